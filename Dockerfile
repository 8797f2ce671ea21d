# NOT BUILT HERE: written without a container runtime, so expect to mend a detail. docs/how_to/container.md has the use.
#
# The CUDA of this image is for what compiles: Triton's and DeepSpeed's kernels, and flash-attn. Its major version should
# be that of the torch wheel, which brings the CUDA libraries that torch itself uses.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

# Triton compiles a launcher per kernel, which takes a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
RUN python3 -m venv /opt/venv && mkdir -p /cache

WORKDIR /app
COPY . .
# Versions are those of setup.py, which is the one place that names them.
RUN pip install --no-cache-dir ".[deepspeed,logging]"

# flash-attn and xformers compile for long; torch's own attention needs neither. `--build-arg GPU_EXTRA=1` adds them.
ARG GPU_EXTRA=
RUN if [ -n "${GPU_EXTRA}" ]; then pip install --no-cache-dir --no-build-isolation ".[gpu]"; fi

# Unhealthy: the driver, a package or the GPU is not what SAGE-Fast needs. `docker inspect` shows what doctor printed.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m CMD ["sage-fast", "doctor"]
ENTRYPOINT ["sage-fast"]
CMD ["doctor"]
