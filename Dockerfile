# The server of pronk on a processor, with the kernels of all instruction sets.
#
#     docker build -t pronk .
#     docker run -p 127.0.0.1:8000:8000 -e PRONK_API_KEY=a-long-secret -v pronk:/models pronk
#     docker run -p 127.0.0.1:8000:8000 -e PRONK_API_KEY=a-long-secret -v pronk:/models pronk --model qwen3-0.6b
#
# Models are downloaded at the first start into the volume /models.
FROM python:3.13-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /pronk
COPY . .
RUN python -m venv /opt/pronk \
    && /opt/pronk/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.13-slim
COPY --from=build /opt/pronk /opt/pronk
ENV PATH=/opt/pronk/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 pronk && mkdir /models && chown pronk /models
USER 1000
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["pronk", "serve", "--host", "0.0.0.0"]
