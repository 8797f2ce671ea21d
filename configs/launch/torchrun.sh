#!/usr/bin/env bash
# A run on several nodes by torchrun. Start the same command on every node, for example
#
#   pdsh -w node[01-08] 'cd /shared/sage-fast && NNODES=8 HEAD=node01 configs/launch/torchrun.sh hv15_480p_full_64gpu'
#
# The arguments are those of `sage-fast train`; the run goes on by itself where it already is (--resume auto).
# docs/distributed.md says what happens when a process or a node fails.
#
# Environment:
#   NNODES, HEAD            number of nodes, or 4:8 for any from 4 to 8, and the one that they meet on (1, localhost)
#   PROCESSES               processes per node: gpu, one for each GPU (gpu)
#   PYTHON                  the interpreter of the environment (python)
#   MASTER_PORT             a free port of HEAD (one node: any; several: from 20000 on, by the arguments)
#   RUN_ID                  the same on all nodes, another one for each run at a time (by the arguments)
#   MAX_RESTARTS            restarts after failures, each from the last checkpoint (3)
#   SHUTDOWN_SECONDS        time to finish an update and save after Ctrl-C or SIGTERM; needs torch >= 2.12 (900)
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: $0 CONFIG [MORE.yaml ...] [--section.key=value ...]" >&2
    exit 2
fi

# Without it restarted processes would wait in the store of those before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# What each GPU was waiting for when a collective did not come to its end; torchfrtrace reads it.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# torch up to 2.11 has no --shutdown-timeout; the variable is read by those that know it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SHUTDOWN_SECONDS:-900}

# Two runs at a time must not meet: one node takes a free port, several know one another by their arguments.
meeting=(--standalone)
if [[ "${NNODES:-1}" != 1 ]]; then
    number=$(printf '%s\0' "$@" | cksum | cut -d ' ' -f 1)
    meeting=(
        --rdzv_backend=c10d
        --rdzv_endpoint="${HEAD:?the node that all meet on}:${MASTER_PORT:-$((20000 + number % 10000))}"
        --rdzv_id="${RUN_ID:-sage-fast-$number}"
    )
fi

# On fewer nodes there are fewer replicas of the weights, and each has more of the videos.
degrees=()
if [[ "${NNODES:-1}" == *:* ]]; then
    degrees=(--distributed.dp_replicate=null)
fi

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --nproc_per_node="${PROCESSES:-gpu}" \
    "${meeting[@]}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    -m sage_fast train --resume auto ${degrees[@]+"${degrees[@]}"} "$@"
