#!/usr/bin/env bash
# Several processes on this machine train one model: launch/local.sh PROCESSES --config=FILE.py [more of empax.main]
# For one process a GPU, or to try out on CPUs what a cluster will do.
set -euo pipefail

processes=${1:?how many processes, then the arguments of empax.main}
shift
export JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-127.0.0.1:29876}
export JAX_NUM_PROCESSES=$processes

# One that fails ends the others: they would wait for it.
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for ((number = 0; number < processes; number++)); do
  # Each process has its own GPU; without any, this says nothing to JAX.
  CUDA_VISIBLE_DEVICES=$number JAX_PROCESS_ID=$number python -m empax.main "$@" &
  pids+=($!)
done
for ((number = 0; number < processes; number++)); do
  wait -n
done
