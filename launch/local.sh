#!/usr/bin/env bash
# Several processes on this machine train one model: launch/local.sh PROCESSES --config=FILE.py [more of empax.main]
# For one process a GPU (those of CUDA_VISIBLE_DEVICES, if it is set), or to try out on CPUs what a cluster will do.
# Ctrl-C or SIGTERM: they save and leave together; Ctrl-C once more ends them at once. Needs bash 5.1.
set -euo pipefail

processes=${1:-}
if [[ ! $processes =~ ^[1-9][0-9]{0,3}$ ]]; then
  echo "error: '$processes' must be the number of processes: launch/local.sh 2 --config=configs/reg_t5.py" >&2
  exit 2
fi
shift
export JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-127.0.0.1:29876}
export JAX_NUM_PROCESSES=$processes

# Each process has its own GPU; without any, their numbers say nothing to JAX.
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
  IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
  if ((${#gpus[@]} > 0 && ${#gpus[@]} < processes)); then
    echo "error: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names ${#gpus[@]} GPUs for $processes processes; name one" \
      "for each, none (CUDA_VISIBLE_DEVICES=) for CPUs, or start fewer processes." >&2
    exit 2
  fi
else
  mapfile -t gpus < <(seq 0 $((processes - 1)))
fi

pids=()
asked=0
tell() { kill "-$1" "${pids[@]}" 2> /dev/null || true; }
# The terminal sends Ctrl-C to all of them itself. A TERM besides does no harm to one that is saving, and ends one that
# has nothing to save: bash has those that it starts ignore Ctrl-C, until training listens to it.
trap 'asked=1; tell TERM' INT TERM

for ((number = 0; number < processes; number++)); do
  CUDA_VISIBLE_DEVICES=${gpus[number]:-} JAX_PROCESS_ID=$number python -m empax.main "$@" &
  pids+=($!)
done
if ((asked)); then tell TERM; fi # also those that came after the signal

code=0
left=$processes
while ((left > 0 && code == 0)); do
  status=0
  wait -n -p ended || status=$?
  if [[ -n ${ended:-} ]]; then
    code=$status
    left=$((left - 1))
  elif ((status == 127)); then # nobody is left: some were killed before there was a wait; other statuses are a signal's
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    break
  fi
done

if ((code)); then
  # One that fails ends the others: they would wait for it. Those that leave because they were asked to know already.
  ((asked)) || tell TERM
  for ((tenths = 0; tenths < 300; tenths++)); do
    kill -0 "${pids[@]}" 2> /dev/null || break
    sleep 0.1 || true
  done
  tell KILL
  wait
fi
exit "$code"
