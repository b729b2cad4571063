# For users of a container builder. `make image` writes an image of the same files without one, reproducibly.
#   docker build --tag s3csi --build-arg VERSION=0.1.0 .
FROM rust:1.95-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends \
    build-essential pkg-config cmake libclang-dev libfuse3-dev ca-certificates
COPY . /source
WORKDIR /source
RUN cargo build --release --locked --workspace --bins --target-dir /target \
    && scripts/image.sh "/target/$(rustc --print host-tuple)/release" /root-of-image/

FROM scratch
COPY --from=build /root-of-image /
ENV PATH=/bin
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="s3csi" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0 AND LGPL-2.1-only" \
      org.opencontainers.image.description="Kubernetes CSI driver that mounts S3 buckets as volumes"
ENTRYPOINT ["/bin/s3csi"]
