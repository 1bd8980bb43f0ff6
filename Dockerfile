# syntax=docker/dockerfile:1
# Sparring with its service. For NVIDIA GPUs:   docker build --tag sparring:cuda .
# For CPUs:   docker build --build-arg TORCH_INDEX=INDEX --tag sparring .
# PyTorch from PyPI brings CUDA along; the host needs the driver and the NVIDIA container toolkit. INDEX is that of
# PyTorch's builds for CPUs, as its installation page names it. docs/guide/install.md shows how to run the image.

FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG TORCH_INDEX=
ARG EXTRAS=demo,serve,pgvector
RUN PIP_INDEX_URL="$TORCH_INDEX" python -m pip install --no-cache-dir "torch>=2.11"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir "$(echo /wheels/sparring-*.whl)[$EXTRAS]" \
    && useradd --create-home --uid 1000 sparring \
    && install --directory --owner sparring /runs /cache
USER 1000
ENV SPARRING_HOME=/cache
WORKDIR /runs
VOLUME ["/runs", "/cache"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["sparring"]
# It needs a token, since others reach it: --env SPARRING_TOKEN=...
CMD ["serve", "first", "--host", "0.0.0.0"]
