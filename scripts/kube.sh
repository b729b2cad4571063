#!/usr/bin/env bash
# Builds the Kubernetes that the tests run: one program that is etcd, kube-apiserver, kube-controller-manager,
# kube-scheduler, kubelet, kubectl and the maker of their certificates, from the Go module in tools/kube. It is kept in
# the user's cache under the hash of everything it is made from, so one that is there is the right one:
#   <cache>/s3csi/tools/kube/<hash>/kube, linked as <cache>/s3csi/tools/bin/kube
# Usage: scripts/kube.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

readonly MODULE=tools/kube
readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools
# The same flags as scripts/tools.sh, so that what both have in common is compiled once.
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

build() {
  local output=$1 version minor stamp=k8s.io/component-base/version
  version=$(cd $MODULE && go list -m -f '{{.Version}}' k8s.io/kubernetes)
  minor=${version#v1.}
  # Without the stamp every component would say that it is v0.0.0. Without the tag the linker must keep every method.
  cd $MODULE && go build -trimpath -tags grpcnotrace -o "$output/kube" -ldflags "-s -w -X $stamp.gitVersion=$version \
    -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*} -X $stamp.gitTreeState=clean" .
}

mkdir -p "$ROOT/bin" "$ROOT/kube"
# Two runs at once would build the same thing twice and rename over each other.
exec 9>"$ROOT/kube/.lock"
if ! flock --nonblock 9; then
  say "another run is building Kubernetes; waiting for it"
  flock 9
fi

hash=$(cat scripts/kube.sh $MODULE/go.mod $MODULE/go.sum $MODULE/*.go | sha256sum | cut --characters=1-16)
readonly directory=$ROOT/kube/$hash
if [[ ! -x $directory/kube ]]; then
  command -v go >/dev/null || fail "go is not installed; it builds Kubernetes (any Go from 1.25 on will do)"
  # A half-built program must never look like a finished one: build aside, then rename.
  rm -rf "$directory.unfinished"
  mkdir "$directory.unfinished"
  narrated "fetching the sources of Kubernetes and etcd" env -C $MODULE go mod download
  narrated "building Kubernetes (about eight minutes on two cores, once)" build "$directory.unfinished"
  mv -T "$directory.unfinished" "$directory"
fi
ln -sfnT "../kube/$hash/kube" "$ROOT/bin/kube"
