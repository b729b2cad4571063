#!/usr/bin/env bash
# Writes an image of the external-provisioner that `make tools` built, for clusters without a registry.
# Usage: scripts/provisioner-image.sh OUTPUT.tar
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/oci.sh
source scripts/oci.sh

readonly TOOLS=${S3CSI_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools/bin}

(($# == 1)) || fail "usage: scripts/provisioner-image.sh OUTPUT.tar"
[[ -x $TOOLS/csi-provisioner ]] || fail "there is no $TOOLS/csi-provisioner; run: make tools"
# The version must be the one in the chart.
version=$(basename "$(dirname "$(readlink -f "$TOOLS/csi-provisioner")")")
root=$(mktemp --directory /tmp/s3csi-image.XXXXXX)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
install --mode 755 "$TOOLS/csi-provisioner" "$root/csi-provisioner"
oci_image "$1" "localhost/csi-provisioner:${version#csi-provisioner-}" "$root" '"Entrypoint":["/csi-provisioner"]'
