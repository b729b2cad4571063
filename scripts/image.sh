#!/usr/bin/env bash
# Writes the container image as an OCI archive: our static programs, a CA bundle and the licences; no shell, no base image.
# The image is reproducible: the same programs give the same digest, which is printed.
# Usage: scripts/image.sh PROGRAMS-DIRECTORY OUTPUT.tar [NAME]
#        scripts/image.sh PROGRAMS-DIRECTORY DIRECTORY/    only the files, for the Dockerfile
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/oci.sh
source scripts/oci.sh

readonly PROGRAMS=(s3csi s3csi-mounter mount-s3)
# The engine's S3 client does not start without a trust store, even for endpoints without TLS.
readonly CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
readonly LIMIT_MEGABYTES=20

# Prints every licence text of the linked packages once, with the names of the packages.
third_party_licences() {
  local registry package version file hash library list
  list=$(mktemp --directory "$work/licences.XXXXXX")
  registry=${CARGO_HOME:-$HOME/.cargo}/registry/src
  # Lists names and versions; compiles nothing.
  cargo tree --locked --offline --edges normal --prefix none --format '{p}' \
    --package s3csi-driver --package s3csi-mounter --package s3csi-engine |
    awk 'NF && $3 !~ /^\(\// { print $1, substr($2, 2) }' | LC_ALL=C sort --unique >"$list/packages"
  while read -r package version; do
    while IFS= read -r file; do
      hash=$(sha256 "$file")
      cp "$file" "$list/$hash.text"
      echo "$package $version" >>"$list/$hash.names"
    done < <(find "$registry"/*/"$package-$version" -type f -regextype egrep -iregex '.*/(licen[cs]e|copying|notice|copyright)[^/]*' ! -name '*.rs' ! -name '*.py' | LC_ALL=C sort)
  done <"$list/packages"
  for library in libfuse3-dev libc6-dev; do
    file=/usr/share/doc/$library/copyright
    [[ -e $file ]] || continue
    cp "$file" "$list/$library.text"
    echo "$library (Debian)" >"$list/$library.names"
  done
  echo "Packages that are part of these programs:"
  cat "$list/packages"
  for file in "$list"/*.names; do
    printf '\n==== %s\n\n' "$(LC_ALL=C sort --unique "$file" | paste --serial --delimiters , | sed 's/,/, /g')"
    cat "${file%.names}.text"
  done
}

# write_root PROGRAMS-DIRECTORY ROOT-DIRECTORY: all files of the image.
write_root() {
  local programs=$1 root=$2 program
  [[ -e $CA_BUNDLE ]] || fail "there is no $CA_BUNDLE; run: make setup"
  mkdir -p "$root"/{bin,etc/ssl/certs,licenses,tmp}
  chmod 1777 "$root/tmp"
  for program in "${PROGRAMS[@]}"; do
    [[ -x $programs/$program ]] || fail "there is no $programs/$program; run: make build"
    strip --strip-all -o "$root/bin/$program" "$programs/$program"
    chmod 755 "$root/bin/$program"
  done
  install --mode 644 "$CA_BUNDLE" "$root$CA_BUNDLE"
  install --mode 644 LICENSE NOTICE "$root/licenses/"
  third_party_licences >"$root/licenses/third-party.txt"
  chmod 644 "$root/licenses/third-party.txt"
}

(($# >= 2)) || fail "usage: scripts/image.sh PROGRAMS-DIRECTORY OUTPUT.tar [NAME]"
work=$(mktemp --directory /tmp/s3csi-image.XXXXXX)
trap 'rm -rf "$work"' EXIT
if [[ $2 == */ ]]; then
  write_root "$1" "${2%/}"
  exit
fi
output=$(realpath --canonicalize-missing "$2")
version=$(awk -F '"' '/^version = / { print $2; exit }' Cargo.toml)
name=${3:-localhost/s3csi:$version}
root=$work/root
write_root "$1" "$root"

mkdir -p "$(dirname "$output")"
config=$(printf '"Entrypoint":["/bin/s3csi"],"Env":["PATH=/bin"],"Labels":{%s}' "$(printf '"org.opencontainers.image.%s":"%s",' \
  title s3csi version "$version" licenses 'Apache-2.0 AND LGPL-2.1-only' \
  description 'Kubernetes CSI driver that mounts S3 buckets as volumes' | sed 's/,$//')")
digest=$(TMPDIR=$work oci_image "$output" "$name" "$root" "$config")
size=$(stat --format %s "$output")
((size < LIMIT_MEGABYTES * 1000000)) || fail "the image has grown to $size bytes; $LIMIT_MEGABYTES MB is the limit"
say "$output: $name, $((size / 1000)) kB"
echo "$digest"
