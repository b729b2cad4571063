# For those who have a container builder. `make image` writes the same image without one, and reproducibly.
#   docker build --tag s3csi .
FROM rust:1.95-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends \
    build-essential pkg-config cmake libclang-dev libfuse3-dev ca-certificates
COPY . /source
WORKDIR /source
RUN cargo build --release --locked --workspace --bins --target-dir /target \
    && mkdir -p /root-of-image/bin /root-of-image/etc/ssl/certs /root-of-image/licenses /root-of-image/tmp \
    && chmod 1777 /root-of-image/tmp \
    && for program in s3csi s3csi-mounter mount-s3; do \
         strip --strip-all -o /root-of-image/bin/$program /target/$(rustc --print host-tuple)/release/$program; \
       done \
    && cp /etc/ssl/certs/ca-certificates.crt /root-of-image/etc/ssl/certs/ \
    && cp LICENSE NOTICE /root-of-image/licenses/

FROM scratch
COPY --from=build /root-of-image /
ENV PATH=/bin
LABEL org.opencontainers.image.title="s3csi" \
      org.opencontainers.image.description="Kubernetes CSI driver that mounts S3 buckets as volumes" \
      org.opencontainers.image.licenses="Apache-2.0 AND LGPL-2.1-only"
ENTRYPOINT ["/bin/s3csi"]
