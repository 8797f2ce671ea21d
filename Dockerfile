# For NVIDIA's container runtime. torch's wheels bring CUDA; Triton compiles its launchers with gcc.
#
#   docker build --tag sage-fast .
#   docker run --gpus all --ipc host --volume "$PWD:/work" sage-fast train wan_quick_lora_24gb
#
# Nobody has built it yet. The tests build the wheel from what it copies, and check the rest by reading.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm --recursive /var/lib/apt/lists/*
WORKDIR /opt/sage-fast
COPY setup.py pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY sage_fast sage_fast
COPY kernels kernels
COPY configs configs
RUN pip install --no-cache-dir --constraint constraints.txt .
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["sage-fast"]
