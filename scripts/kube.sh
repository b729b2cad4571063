#!/usr/bin/env bash
# Builds the Kubernetes for the tests: one program that is etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
# kubelet, kubectl and a certificate generator, from the Go module in tools/kube. It is stored in the user's cache under the
# hash of its inputs, so an existing one is up to date:
#   <cache>/s3csi/tools/kube/<hash>/kube, linked as <cache>/s3csi/tools/bin/kube
# Usage: scripts/kube.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

readonly MODULE=tools/kube
readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools
# The same flags as scripts/tools.sh, so that shared packages are compiled once.
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

build() {
  local output=$1 version minor stamp=k8s.io/component-base/version
  version=$(cd $MODULE && go list -m -f '{{.Version}}' k8s.io/kubernetes)
  minor=${version#v1.}
  # Without the stamp every component reports v0.0.0. Without the tag the linker keeps every method.
  cd $MODULE && go build -trimpath -tags grpcnotrace -o "$output/kube" -ldflags "-s -w -X $stamp.gitVersion=$version \
    -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*} -X $stamp.gitTreeState=clean" .
}

mkdir -p "$ROOT/bin" "$ROOT/kube"
# Concurrent runs would build the same program and rename over each other.
exec 9>"$ROOT/kube/.lock"
if ! flock --nonblock 9; then
  say "another run is building Kubernetes; waiting for it"
  flock 9
fi

hash=$(cat scripts/kube.sh $MODULE/go.mod $MODULE/go.sum $MODULE/*.go | sha256sum | cut --characters=1-16)
readonly directory=$ROOT/kube/$hash
if [[ ! -x $directory/kube ]]; then
  command -v go >/dev/null || fail "go is not installed; it builds Kubernetes (Go 1.25 or later)"
  # Build aside, then rename: an interrupted build must not look complete.
  rm -rf "$directory.unfinished"
  mkdir "$directory.unfinished"
  narrated "fetching the sources of Kubernetes and etcd" env -C $MODULE go mod download
  narrated "building Kubernetes (about eight minutes on two cores, once)" build "$directory.unfinished"
  mv -T "$directory.unfinished" "$directory"
fi
ln -sfnT "../kube/$hash/kube" "$ROOT/bin/kube"
