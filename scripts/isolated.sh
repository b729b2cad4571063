#!/usr/bin/env bash
# Runs a command in its own mount namespace. Its mounts disappear with it, and no container started meanwhile on this machine
# can pin one of them (a pinned FUSE mount keeps its engine alive after the unmount).
# Usage: scripts/isolated.sh command arguments…
set -euo pipefail
# shellcheck source=scripts/narrate.sh
source "$(dirname "$0")/narrate.sh"

((EUID == 0)) || fail "mounting needs root; run this as root"
[[ -c /dev/fuse ]] || fail "/dev/fuse is missing; load the kernel module: modprobe fuse"
exec unshare --mount --propagation private -- "$@"
