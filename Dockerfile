# The image of the server: CUDA where there is a GPU (engine { backend: CUDA }), the CPU elsewhere.
#   docker build -t carryover .                      everything
#   docker build -t carryover --target cpu .         without cuBLASLt, which is most of the size
#   docker run --rm carryover --check --config ...   arguments are those of carryover-server
# deploy/compose.yaml runs it beside Prometheus and Grafana. The system is Debian 12, whose packages
# scripts/setup knows, and CUDA comes from NVIDIA's image, which has no Debian one: its toolkit lies in
# one folder and asks for nothing of the system but glibc.

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS toolkit

FROM debian:12-slim AS build
COPY --from=toolkit /usr/local/cuda-13.0 /usr/local/cuda
WORKDIR /src
# Packages before sources, so that a changed source installs nothing anew.
COPY scripts/setup scripts/setup
RUN scripts/setup --build
COPY . .
RUN cmake --preset cpu -DCARRYOVER_BUILD_TESTS=OFF && \
    cmake --build build --parallel "$(nproc)" --target carryover-server carryover
# The module reads tokenizer.model; it is looked for beside the program.
RUN install -D --strip --target-directory /out \
      build/bin/carryover-server build/bin/carryover build/bin/carryover_sentencepiece.so

FROM debian:12-slim AS cpu
# What the programs load: ldd of the programs names the libraries.
RUN apt-get -qq update && \
    DEBIAN_FRONTEND=noninteractive apt-get -y -qq install --no-install-recommends \
      libabsl20220623 libcivetweb1 libgrpc++1.51 libhwy1 libpcre2-8-0 libprometheus-cpp-core1.0 libprotobuf32 \
      libsentencepiece0 libspdlog1.10 libssl3 libutf8proc2 && \
    rm -rf /var/lib/apt/lists/*
# Nobody's home; /var/lib/carryover is all that the server writes (fidelity.gate.state_file).
RUN useradd --system --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin carryover && \
    install -d -o carryover -g carryover -m 0700 /var/lib/carryover
COPY --from=build /out/ /usr/local/bin/
COPY deploy/compose/server.txtpb /etc/carryover/server.txtpb
USER carryover
EXPOSE 50051 8080
VOLUME /var/lib/carryover
# Health is gRPC's own service on 127.0.0.1:50051. Loading a model may take minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["/usr/local/bin/carryover", "health"]
# SIGTERM drains (drain_timeout_seconds) before the server ends: docker stop --time 45.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/carryover-server"]
CMD ["--config", "/etc/carryover/server.txtpb"]

FROM cpu AS server
# The one library of CUDA's that is loaded, when a device is opened. The driver comes from the host, through
# NVIDIA's container toolkit, which reads these variables.
COPY --from=toolkit /usr/local/cuda-13.0/lib64/libcublasLt.so.13 /usr/local/lib/
USER root
RUN ldconfig
USER carryover
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
