#!/usr/bin/env bash
# Builds the Go programs that the tests run against, each pinned, once per version, into the user's cache:
#   <cache>/s3csi/tools/<name>-<version>/<name>, linked as <cache>/s3csi/tools/bin/<name>
# Usage: scripts/tools.sh [NAME…]   (without a name: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

# Name, version, package, and "in-tree" for a module that Go only builds as the main one, because it replaces others.
# A version is always exact: not every module proxy can list the versions of these modules.
readonly TOOLS=(
  # An S3 server that we did not write; the engine's conformance suite and the benchmarks run against it.
  "versitygw v1.8.0 github.com/versity/versitygw/cmd/versitygw"
  # The CSI project's own test suite for drivers.
  "csi-sanity v5.6.0 github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"
  # The tool people install the chart with: the chart's tests render and check it as they would.
  "helm v3.22.0 helm.sh/helm/v3/cmd/helm"
  # The sidecar that makes PersistentVolumes for claims: volumes on demand are tested with it.
  "csi-provisioner v5.1.0 github.com/kubernetes-csi/external-provisioner/v5/cmd/csi-provisioner in-tree"
)
readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools

ensure_tool() {
  local name=$1 version=$2 package=$3 how=${4:-}
  local directory=$ROOT/$name-$version
  if [[ ! -x $directory/$name ]]; then
    command -v go >/dev/null || fail "go is not installed; it builds $name (any Go from 1.25 on will do)"
    # A half-built tool must never look like a finished one: build aside, then rename.
    local unfinished=$directory.unfinished
    rm -rf "$unfinished"
    mkdir -p "$unfinished"
    if [[ $how == in-tree ]]; then
      narrated "building $name $version (one to six minutes, once)" build_in_tree "$unfinished/$name" "$version" "$package"
    else
      narrated "building $name $version (one to six minutes, once)" \
        env CGO_ENABLED=0 GOBIN="$unfinished" go install -trimpath -ldflags='-s -w' "$package@$version"
    fi
    rm -rf "$directory"
    mv -T "$unfinished" "$directory"
  fi
  ln -sfnT "../$name-$version/$name" "$ROOT/bin/$name"
}

# build_in_tree OUTPUT VERSION PACKAGE: builds in a copy of the module's own directory.
build_in_tree() {
  local output=$1 version=$2 package=$3 module=${3%%/cmd/*} source
  source=$(mktemp --directory "$ROOT/source.XXXXXX")
  cp -r "$(go mod download -json "$module@$version" | awk -F '"' '$2 == "Dir" { print $4 }')/." "$source"
  chmod -R u+w "$source"
  # The published module has the list of what was vendored, but nothing of it.
  rm -rf "$source/vendor"
  (cd "$source" && CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags='-s -w' -o "$output" "./cmd/${package##*/}")
  rm -rf "$source"
}

mkdir -p "$ROOT/bin"
# Two runs at once would build the same thing twice and rename over each other.
exec 9>"$ROOT/.lock"
if ! flock --nonblock 9; then
  say "another run is building the tools; waiting for it"
  flock 9
fi

wanted=" $* "
for tool in "${TOOLS[@]}"; do
  read -r name version package how <<<"$tool"
  if (($# == 0)) || [[ $wanted == *" $name "* ]]; then
    ensure_tool "$name" "$version" "$package" "$how"
  fi
  wanted=${wanted/ $name / }
done
[[ -z ${wanted// /} ]] || fail "no such tool:${wanted% }"
