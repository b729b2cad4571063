#!/usr/bin/env bash
# Builds the programs that tests and lint use, pinned, once per version, into the user's cache:
#   <cache>/s3csi/tools/<name>-<version>/<name>, linked as <cache>/s3csi/tools/bin/<name>
# The other programs of its module and its chart are beside aws-s3-csi-driver and aws-s3-csi-driver-unchanged.
# Usage: scripts/tools.sh [NAME…]   (without a name: all but the optional ones)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

# Name, version, package, and "in-tree" for a module that builds only as the main module, because it has replace directives, or
# "driver" for another CSI driver, of which all programs are built under our driver's name, "unchanged" for one under its own name,
# or "crate" for a program from crates.io.
# Versions are exact: not every module proxy can list the versions of these modules.
readonly TOOLS=(
  # An independent S3 server: the engine's conformance suite and the benchmarks run against it.
  "versitygw v1.8.0 github.com/versity/versitygw/cmd/versitygw"
  # The CSI project's own test suite for drivers.
  "csi-sanity v5.6.0 github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"
  # Renders and installs the chart in its tests.
  "helm v3.22.0 helm.sh/helm/v3/cmd/helm"
  # The sidecar that creates PersistentVolumes for claims, for the tests of dynamic provisioning.
  "csi-provisioner v5.1.0 github.com/kubernetes-csi/external-provisioner/v5/cmd/csi-provisioner in-tree"
  # Random reads, writes, truncates and maps against a model: the engine's conformance suite runs it.
  "fsx 0.3.2 fsx crate"
  # Checks the workflows in .github for `make lint`.
  "actionlint v1.7.12 github.com/rhysd/actionlint/cmd/actionlint"
  # The driver that Scality's 1.x and 2.x were forked from: tests upgrade clusters from it to ours.
  "aws-s3-csi-driver v1.15.0 github.com/awslabs/mountpoint-s3-csi-driver/cmd/aws-s3-csi-driver driver"
  # The same under its own name: tests upgrade from it with driverName=s3.csi.aws.com.
  "aws-s3-csi-driver-unchanged v1.15.0 github.com/awslabs/mountpoint-s3-csi-driver/cmd/aws-s3-csi-driver unchanged"
)
# Built only when they are named.
readonly OPTIONAL_TOOLS=(
  # Rules of POSIX for file systems, one by one: `make compatibility` runs it.
  "pjdfstest 0.2.2 pjdfstest crate"
)
readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools

ensure_tool() {
  local name=$1 version=$2 package=$3 how=${4:-}
  local directory=$ROOT/$name-$version
  if [[ ! -x $directory/$name ]]; then
    [[ $how == crate ]] || command -v go >/dev/null || fail "go is not installed; it builds $name (Go 1.25 or later)"
    # Build aside, then rename: an interrupted build must not look complete.
    local unfinished=$directory.unfinished
    rm -rf "$unfinished"
    mkdir -p "$unfinished"
    local title="building $name $version (one to six minutes, once)"
    case $how in
      in-tree) narrated "$title" build_in_tree "$unfinished" "$version" "$package" ;;
      crate) narrated "$title" install_crate "$unfinished" "$version" "$package" ;;
      driver) narrated "$title" build_driver "$unfinished" "$version" "$package" ;;
      unchanged) narrated "$title" build_unchanged "$unfinished" "$version" "$package" ;;
      *)
        narrated "$title" \
          env CGO_ENABLED=0 GOBIN="$unfinished" go install -trimpath -ldflags='-s -w' "$package@$version"
        ;;
    esac
    rm -rf "$directory"
    mv -T "$unfinished" "$directory"
  fi
  ln -sfnT "../$name-$version/$name" "$ROOT/bin/$name"
}

# copy_module VERSION PACKAGE: prints a writable copy of the package's module.
copy_module() {
  local version=$1 module=${2%%/cmd/*} source
  source=$(mktemp --directory "$ROOT/source.XXXXXX")
  cp -r "$(go mod download -json "$module@$version" | awk -F '"' '$2 == "Dir" { print $4 }')/." "$source"
  chmod -R u+w "$source"
  # The published module contains the list of vendored packages, but not the packages.
  rm -rf "$source/vendor"
  echo "$source"
}

# build_in_tree DIRECTORY VERSION PACKAGE: builds in a copy of the module's own directory.
build_in_tree() {
  local directory=$1 version=$2 package=$3 source
  source=$(copy_module "$version" "$package")
  (cd "$source" && CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags='-s -w' -o "$directory" "./cmd/${package##*/}")
  rm -rf "$source"
}

# build_driver DIRECTORY VERSION PACKAGE: all programs of another driver and its chart, with our driver's name in place of its own, and
# with the version of attachments and the names of Mountpoint Pods that Scality's fork of it has.
build_driver() {
  local directory=$1 version=$2 package=$3 source
  source=$(copy_module "$version" "$package")
  grep --recursive --files-with-matches --include='*.go' --include='*.yaml' --fixed-strings s3.csi.aws.com "$source" |
    xargs sed --in-place 's/s3\.csi\.aws\.com/s3.csi.scality.com/g'
  sed --in-place 's/Version: "v2beta"/Version: "v2"/' "$source/pkg/api/v2beta/groupversion_info.go"
  sed --in-place 's/- name: v2beta$/- name: v2/' "$source"/charts/*/templates/*-crd.yaml
  sed --in-place --expression 's|GenerateName: "mp-",|Name: fmt.Sprintf("mp-%x", sha256.Sum224([]byte(uuid.NewString()+pv.Name))),|' \
    --expression 's|^\t"errors"$|\t"crypto/sha256"\n&|' \
    --expression 's|^\t"github.com/go-logr/logr"$|&\n\t"github.com/google/uuid"|' "$source/pkg/podmounter/mppod/creator.go"
  build_programs_and_chart "$directory" "$version" "$package" "$source"
}

# build_unchanged DIRECTORY VERSION PACKAGE: all programs of another driver and its chart.
build_unchanged() {
  build_programs_and_chart "$1" "$2" "$3" "$(copy_module "$2" "$3")"
  ln -s "${3##*/}" "$1/${3##*/}-unchanged"
}

# build_programs_and_chart DIRECTORY VERSION PACKAGE SOURCE: the source is removed.
build_programs_and_chart() {
  local directory=$1 version=$2 package=$3 source=$4
  local labels=${package%%/cmd/*}/pkg/driver/version.driverVersion=${version#v}
  (cd "$source" && CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags="-s -w -X $labels" -o "$directory" ./cmd/...)
  cp -r "$source"/charts/* "$directory/chart"
  rm -rf "$source"
}

# install_crate DIRECTORY VERSION CRATE: builds a program from crates.io for this machine.
install_crate() {
  env -u CARGO_BUILD_TARGET CARGO_TARGET_DIR="$1/target" \
    cargo install --quiet --locked --root "$1" --version "$2" "$3"
  mv "$1/bin/$3" "$1/$3"
  rm -rf "${1:?}/target" "${1:?}/bin" "${1:?}"/.crates*
}

mkdir -p "$ROOT/bin"
# Concurrent runs would build the same programs and rename over each other.
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
for tool in "${OPTIONAL_TOOLS[@]}"; do
  read -r name version package how <<<"$tool"
  if [[ $wanted == *" $name "* ]]; then
    ensure_tool "$name" "$version" "$package" "$how"
    wanted=${wanted/ $name / }
  fi
done
[[ -z ${wanted// /} ]] || fail "no such tool:${wanted% }"
