#!/usr/bin/env bash
# Creates a root directory with the systemd of Debian 13, once, in the user's cache; scripts/with-systemd.sh runs tests in it.
# Debian keeps only the newest revision of a release, so the release is pinned and the version checked; /packages in the root
# directory lists what was installed.
# Usage: scripts/systemd-root.sh
#   DEBIAN_MIRROR  where packages come from
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/packages.sh
source scripts/packages.sh

readonly RELEASE=trixie VERSION=257
readonly PACKAGES=(
  systemd
  ca-certificates # the S3 client does not start without a trust store
)
readonly MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
readonly CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi
readonly ROOT=$CACHE/systemd-$VERSION

((EUID == 0)) || fail "creating a root directory needs root; run this as root"
mkdir -p "$CACHE"
# Concurrent runs would build the same directory and rename over each other.
exec 9>"$ROOT.lock"
if ! flock --nonblock 9; then
  say "another run is building $ROOT; waiting for it"
  flock 9
fi
if [[ -e $ROOT/packages ]]; then
  exit 0
fi

command -v debootstrap >/dev/null || ensure_packages debootstrap
[[ -e $KEYRING ]] || fail "$KEYRING is missing; run: apt-get install debian-archive-keyring"

# Build aside, then rename: an interrupted build must not look complete.
readonly UNFINISHED=$ROOT.unfinished
rm -rf --one-file-system "$UNFINISHED"
packages=$(
  IFS=,
  echo "${PACKAGES[*]%% *}"
)
# In its own mount namespace, so that mounts of debootstrap disappear with it.
narrated "building a root directory with systemd $VERSION (a minute, once)" \
  scripts/isolated.sh debootstrap --variant=minbase --keyring="$KEYRING" --include="$packages" \
  "$RELEASE" "$UNFINISHED" "$MIRROR"
rm -rf "$UNFINISHED"/var/cache/apt/archives/*.deb "$UNFINISHED"/var/lib/apt/lists/*
found=$(dpkg-query --admindir="$UNFINISHED/var/lib/dpkg" --show --showformat='${Version}' systemd)
[[ $found == "$VERSION".* || $found == "$VERSION"-* ]] || fail "$RELEASE has systemd $found and not $VERSION"
dpkg-query --admindir="$UNFINISHED/var/lib/dpkg" --show >"$UNFINISHED/packages"
rm -rf --one-file-system "$ROOT"
mv -T "$UNFINISHED" "$ROOT"
say "systemd $found is in $ROOT"
