#!/usr/bin/env bash
# Writes the images of the driver that `make tools` builds from another project, for the tests that upgrade from it to ours:
#   DIRECTORY/driver.tar   localhost/aws-s3-csi-driver:v1.15.0, its programs around our engine
#   DIRECTORY/sidecar.tar  localhost/csi-sidecar:test, which stands for the registrar and the livenessprobe
# TOOL is aws-s3-csi-driver or aws-s3-csi-driver-unchanged.
# Usage: scripts/earlier-driver-image.sh PROGRAMS-DIRECTORY TOOL DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/oci.sh
source scripts/oci.sh

readonly CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
# Loaded once, on this machine.
export OCI_COMPRESSION=--fast

(($# == 3)) || fail "usage: scripts/earlier-driver-image.sh PROGRAMS-DIRECTORY TOOL DIRECTORY"
programs=$1
output=$(realpath --canonicalize-missing "$3")
tools=${S3CSI_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools/bin}
driver=$(dirname "$(readlink --canonicalize-existing "$tools/$2")") || fail "there is no $tools/$2; run: make tools"
work=$(mktemp --directory /tmp/s3csi-image.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$output"

root=$work/driver
mkdir -p "$root"/{bin,usr/bin,etc/ssl/certs,mountpoint-s3/bin,tmp}
chmod 1777 "$root/tmp"
for program in aws-s3-csi-driver aws-s3-csi-controller aws-s3-csi-mounter install-mp; do
  install --mode 755 "$driver/$program" "$root/bin/$program"
done
strip --strip-all -o "$root/mountpoint-s3/bin/mount-s3" "$programs/mount-s3"
chmod 755 "$root/mountpoint-s3/bin/mount-s3"
install --mode 644 "$CA_BUNDLE" "$root$CA_BUNDLE"
# The pod mounter runs these two by name.
install --mode 755 /bin/busybox "$root/bin/busybox"
for applet in mount umount; do ln -s busybox "$root/bin/$applet"; done
TMPDIR=$work oci_image "$output/driver.tar" localhost/aws-s3-csi-driver:v1.15.0 "$root" \
  '"Entrypoint":["/bin/aws-s3-csi-driver"],"Env":["PATH=/bin","MOUNTPOINT_VERSION=1.19.0","MOUNTPOINT_BIN_DIR=/mountpoint-s3/bin"]' >/dev/null

root=$work/sidecar
mkdir -p "$root"
strip --strip-all -o "$root/csi-node-driver-registrar" "$programs/csi-sidecar"
chmod 755 "$root/csi-node-driver-registrar"
TMPDIR=$work oci_image "$output/sidecar.tar" localhost/csi-sidecar:test "$root" \
  '"Entrypoint":["/csi-node-driver-registrar"]' >/dev/null
