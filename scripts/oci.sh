# shellcheck shell=bash
# Sourced by scripts that write container images: one layer and some JSON, without registry, daemon or root.

# oci_image OUTPUT.tar NAME ROOT-DIRECTORY CONFIG-MEMBERS
#   writes an OCI layout as an archive, with one layer of the directory's files. It is reproducible: order, owners and times
#   are fixed. CONFIG-MEMBERS are the members of the image's `config` object, as JSON without its braces. Prints the digest
#   for `image@sha256:…`. OCI_COMPRESSION is an option of gzip.
oci_image() {
  local output=$1 name=$2 root=$3 config=$4 layout architecture layer layer_digest config_digest manifest
  layout=$(mktemp --directory "${TMPDIR:-/tmp}/s3csi-image.XXXXXX")
  case $(uname -m) in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
  esac
  local -r kind=application/vnd.oci.image
  mkdir -p "$layout/blobs/sha256"

  fixed_tar "$root" . >"$layout/layer"
  layer=$(sha256 "$layout/layer")
  gzip --no-name "${OCI_COMPRESSION:---best}" <"$layout/layer" >"$layout/layer.gz"
  rm "$layout/layer"
  layer_digest=$(add_blob "$layout" "$layout/layer.gz")

  printf '{"architecture":"%s","os":"linux","config":{%s},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created_by":"make image"}]}' \
    "$architecture" "$config" "$layer" >"$layout/config"
  config_digest=$(add_blob "$layout" "$layout/config")

  printf '{"schemaVersion":2,"mediaType":"%s.manifest.v1+json","config":%s,"layers":[%s]}' "$kind" \
    "$(descriptor "$layout" $kind.config.v1+json "$config_digest")" \
    "$(descriptor "$layout" $kind.layer.v1.tar+gzip "$layer_digest")" >"$layout/manifest"
  manifest=$(add_blob "$layout" "$layout/manifest")

  printf '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"
  # containerd reads the name from its own annotation, other programs the tag from the standard one.
  printf '{"schemaVersion":2,"mediaType":"%s.index.v1+json","manifests":[%s]}' "$kind" \
    "$(descriptor "$layout" $kind.manifest.v1+json "$manifest" "\"platform\":{\"architecture\":\"$architecture\",\"os\":\"linux\"},\"annotations\":{\"io.containerd.image.name\":\"$name\",\"org.opencontainers.image.ref.name\":\"${name##*:}\"}")" \
    >"$layout/index.json"

  fixed_tar "$layout" oci-layout index.json blobs >"$output.unfinished"
  mv "$output.unfinished" "$output"
  rm -rf "$layout"
  echo "sha256:$manifest"
}

fixed_tar() {
  local directory=$1
  shift
  tar --create --directory "$directory" --format gnu --sort name --mtime @0 --owner 0 --group 0 --numeric-owner "$@"
}

sha256() {
  sha256sum "$1" | cut --characters=1-64
}

# add_blob LAYOUT FILE: moves the file to the path of its digest, and prints the digest.
add_blob() {
  local digest
  digest=$(sha256 "$2")
  mv "$2" "$1/blobs/sha256/$digest"
  echo "$digest"
}

# descriptor LAYOUT MEDIA-TYPE DIGEST [MORE-MEMBERS]
descriptor() {
  printf '{"mediaType":"%s","digest":"sha256:%s","size":%d%s}' "$2" "$3" "$(stat --format %s "$1/blobs/sha256/$3")" "${4:+,$4}"
}
