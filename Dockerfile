# Fourfold in a container. The base decides where it runs:
#
#   docker build -t fourfold:cpu .
#   docker build -t fourfold:cuda --build-arg BASE=nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# Checked by tests/test_dockerfile.py, which has no Docker: that what it copies and installs is
# there and fits constraints.txt. It was built nowhere yet.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# CUDA's base has no Python; a C compiler builds the kernels that generate text, where there is one.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev iproute2 \
    && (command -v python3 > /dev/null \
        && python3 -c 'import ensurepip' \
        || apt-get install -y --no-install-recommends python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/*

# torch first and by its exact version, from the index of its build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/fourfold
COPY constraints.txt ./
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --index-url ${TORCH_INDEX} \
        "$(grep '^torch==' constraints.txt | cut -d+ -f1)"
COPY pyproject.toml README.md LICENSE ./
COPY fourfold ./fourfold
RUN /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt .

# SkyPilot sets its containers up as root: --build-arg RUN_AS=root.
RUN useradd --create-home --uid 1000 fourfold
ARG RUN_AS=fourfold
USER ${RUN_AS}
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1
WORKDIR /work
# No shell between: signals reach the run, which saves and ends.
ENTRYPOINT ["fourfold"]
CMD ["--help"]
