#!/usr/bin/env bash
# PID 1 of the cluster's outer namespaces: network, etcd, API server, controller manager, scheduler, and an S3 server.
# Only scripts/cluster.sh starts this.
# Usage: control-plane.sh DIRECTORY KUBE-PROGRAM VERSITYGW-PROGRAM
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=scripts/narrate.sh
source "$here/../narrate.sh"
# shellcheck source=scripts/cluster/namespaces.sh
source "$here/namespaces.sh"

readonly DIRECTORY=$1 KUBE=$2 VERSITYGW=$3
readonly RUN=$DIRECTORY/cp/run LOGS=$DIRECTORY/logs PKI=$DIRECTORY/pki

# supervise NAME COMMAND…: starts it, and restarts it shortly after it ended unless the file NAME.down exists.
supervise() {
  local name=$1
  shift
  while :; do
    if [[ -e $RUN/$name.down ]]; then
      sleep 0.05
      continue
    fi
    "$@" >>"$LOGS/$name.log" 2>&1 &
    echo $! >"$RUN/$name.pid"
    wait $! || true
    sleep 0.2
  done &
}

mount --make-rprivate /
mount_sysfs_and_cgroups
protect_sysctls
hostname control-plane
echo 1 >/proc/sys/net/ipv4/ip_forward
ip link set lo up
# The Service address of the API server. With the address on this interface no proxy is needed.
ip address add 10.96.0.1/32 dev lo
ip link add nodes type bridge
ip address add 10.200.0.1/16 dev nodes
ip link set nodes up

cat >"$DIRECTORY/audit-policy.yaml" <<POLICY
apiVersion: audit.k8s.io/v1
kind: Policy
# Watches are also logged when they start: they may end hours later.
omitStages: [RequestReceived]
rules:
- level: Metadata
POLICY

supervise etcd "$KUBE" etcd --data-dir "$DIRECTORY/cp/etcd" --unsafe-no-fsync --log-level warn \
  --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
supervise apiserver "$KUBE" kube-apiserver --etcd-servers http://127.0.0.1:2379 --bind-address 0.0.0.0 --secure-port 443 \
  --advertise-address 10.200.0.1 --endpoint-reconciler-type lease --service-cluster-ip-range 10.96.0.0/16 \
  --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged=true \
  --client-ca-file "$PKI/ca.crt" --tls-cert-file "$PKI/apiserver.crt" --tls-private-key-file "$PKI/apiserver.key" \
  --kubelet-client-certificate "$PKI/apiserver-kubelet-client.crt" --kubelet-client-key "$PKI/apiserver-kubelet-client.key" \
  --kubelet-certificate-authority "$PKI/ca.crt" --kubelet-preferred-address-types InternalIP \
  --service-account-issuer https://kubernetes.default.svc.cluster.local --service-account-key-file "$PKI/sa.key" \
  --service-account-signing-key-file "$PKI/sa.key" --cert-dir "$DIRECTORY/cp/certificates" \
  --audit-policy-file "$DIRECTORY/audit-policy.yaml" --audit-log-path "$LOGS/audit.log"
# Short leases and high client rate limits: the defaults are made for thousands of nodes and slow tests down.
hurry=(--leader-elect-lease-duration 4s --leader-elect-renew-deadline 3s --leader-elect-retry-period 500ms
  --kube-api-qps 300 --kube-api-burst 600 --bind-address 127.0.0.1 --cert-dir "$DIRECTORY/cp/certificates")
supervise controller-manager "$KUBE" kube-controller-manager --kubeconfig "$PKI/controller-manager.kubeconfig" \
  --service-account-private-key-file "$PKI/sa.key" --root-ca-file "$PKI/ca.crt" --use-service-account-credentials=true "${hurry[@]}"
supervise scheduler "$KUBE" kube-scheduler --kubeconfig "$PKI/scheduler.kubeconfig" "${hurry[@]}"
# The API without certificates, for frequent queries that would be too slow with a kubectl process each.
supervise api-socket "$KUBE" kubectl proxy --kubeconfig "$PKI/admin.kubeconfig" --unix-socket "$DIRECTORY/api.sock"

mkdir -p "$DIRECTORY/s3/accounts" "$DIRECTORY/s3/buckets"
# Its posix backend changes the working directory, so all paths are absolute. The keys are in the environment.
supervise versitygw "$VERSITYGW" --port 10.200.0.1:7070 --iam-dir "$DIRECTORY/s3/accounts" --keep-alive --quiet \
  --health /health posix "$DIRECTORY/s3/buckets"
# The same buckets with TLS. Its certificate is of the cluster's own authority, which no client trusts unless it is told.
supervise versitygw-tls "$VERSITYGW" --port 10.200.0.1:7443 --iam-dir "$DIRECTORY/s3/accounts" --keep-alive --quiet \
  --cert "$PKI/apiserver.crt" --key "$PKI/apiserver.key" posix "$DIRECTORY/s3/buckets"

# PID 1 receives only signals it has a handler for, and has to reap orphans.
trap : TERM INT HUP
: >"$RUN/started"
while :; do
  wait || true
  sleep 1
done
