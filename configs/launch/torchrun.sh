#!/usr/bin/env bash
# A run on several nodes by torchrun. Start the same command on every node of the hostfile, for example
#
#   pdsh -w node[01-08] 'cd /shared/sage-fast && configs/launch/torchrun.sh hosts.txt hv15_480p_full_64gpu'
#
# What follows the hostfile is for `sage-fast train`. The hostfile has a line "node01 slots=8" per node; the nodes meet
# on the first one. docs/distributed.md says what happens when a process or a node fails.
#
# Environment:
#   PYTHON                  the interpreter of the environment (python)
#   MASTER_PORT             a free port of the first node (29500)
#   RUN_ID                  the same on all nodes, another one for each run at a time (sage-fast)
#   MAX_RESTARTS            restarts after failures, each from the last checkpoint (3)
#   SHUTDOWN_SECONDS        time to finish an update and save after Ctrl-C or SIGTERM; needs torch >= 2.12 (900)
#   NODE_RANK               the line of the hostfile that is this node, from 0, where its name does not tell
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 HOSTFILE CONFIG [MORE.yaml ...] [--section.key=value ...]" >&2
    exit 2
fi
hostfile=$1
shift

PYTHON=${PYTHON:-python}
node_option=()
if [[ -n "${NODE_RANK:-}" ]]; then
    node_option=(--node_rank "$NODE_RANK")
fi
# Not eval "$(...)": a failure inside would be lost.
assignments=$("$PYTHON" -m sage_fast.distributed.hostfile "$hostfile" ${node_option[@]+"${node_option[@]}"})
eval "$assignments"

# What each GPU was waiting for when a collective did not come to its end; the watchdog writes it down, and so does NCCL.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# torch up to 2.11 has no --shutdown-timeout; the variable is read by those that know it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SHUTDOWN_SECONDS:-900}

# Which node hosts the meeting is said, not guessed: an address in the hostfile may not be a name of the node.
is_host=0
if [[ "$NODE_RANK" -eq 0 ]]; then
    is_host=1
fi

exec "$PYTHON" -m torch.distributed.run \
    --nnodes="$NNODES" \
    --nproc_per_node="$NPROC_PER_NODE" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" \
    --rdzv_conf="is_host=$is_host" \
    --rdzv_id="${RUN_ID:-sage-fast}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    -m sage_fast train "$@"
