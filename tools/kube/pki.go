package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Who signs itself in to the API server, and what its authorizer knows it as.
type identity struct {
	file, commonName, organization string
}

// authority is a certificate authority that writes what it issues into one directory.
type authority struct {
	directory   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
	issued      int64
}

// writePKI makes all keys of one throw-away cluster:
//
//	pki DIRECTORY SERVER-URL [NODE=ADDRESS…]
//
// DIRECTORY gets ca.crt, the API server's serving certificate (apiserver) and its client certificate for kubelets
// (apiserver-kubelet-client), the key that signs service account tokens (sa), a serving certificate for each kubelet
// (kubelet-NODE), and a kubeconfig for each of admin, controller-manager, scheduler and node-NODE.
func writePKI(arguments []string) error {
	if len(arguments) < 2 {
		return fmt.Errorf("usage: pki DIRECTORY SERVER-URL [NODE=ADDRESS…]")
	}
	directory, server := arguments[0], arguments[1]
	address, err := url.Parse(server)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	authority, err := newAuthority(directory)
	if err != nil {
		return err
	}

	// 10.96.0.1 is what Pods know the API server by; the names are what their clients may check.
	serverNames := []string{address.Hostname(), "127.0.0.1", "localhost", "10.96.0.1",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	if _, _, err := authority.issue(identity{file: "apiserver", commonName: "kube-apiserver"}, serverNames); err != nil {
		return err
	}
	users := []identity{
		{"admin", "admin", "system:masters"},
		{"controller-manager", "system:kube-controller-manager", ""},
		{"scheduler", "system:kube-scheduler", ""},
	}
	bare := []identity{{"apiserver-kubelet-client", "apiserver-kubelet-client", "system:masters"}, {"sa", "service-account", ""}}
	for _, it := range bare {
		if _, _, err := authority.issue(it, nil); err != nil {
			return err
		}
	}
	for _, node := range arguments[2:] {
		name, address, found := strings.Cut(node, "=")
		if !found {
			return fmt.Errorf("%q is not NODE=ADDRESS", node)
		}
		serving := identity{"kubelet-" + name, "system:node:" + name, "system:nodes"}
		if _, _, err := authority.issue(serving, []string{name, "127.0.0.1", address}); err != nil {
			return err
		}
		users = append(users, identity{"node-" + name, "system:node:" + name, "system:nodes"})
	}
	for _, user := range users {
		certificate, key, err := authority.issue(user, nil)
		if err != nil {
			return err
		}
		kubeconfig := kubeconfig(server, authority.pem, certificate, key)
		if err := os.WriteFile(filepath.Join(directory, user.file+".kubeconfig"), kubeconfig, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func newAuthority(directory string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test-cluster"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	encoded := encode("CERTIFICATE", der)
	made := &authority{directory: directory, certificate: template, key: key, pem: encoded, issued: 1}
	return made, os.WriteFile(filepath.Join(directory, "ca.crt"), encoded, 0o644)
}

// issue writes <file>.crt and <file>.key and returns both. names are host names and addresses the holder may serve.
func (a *authority) issue(holder identity, names []string) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	a.issued++
	subject := pkix.Name{CommonName: holder.commonName}
	if holder.organization != "" {
		subject.Organization = []string{holder.organization}
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.issued), Subject: subject,
		NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if address := net.ParseIP(name); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &private.PublicKey, a.key)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	certificate, key = encode("CERTIFICATE", der), encode("EC PRIVATE KEY", keyDER)
	path := filepath.Join(a.directory, holder.file)
	if err := os.WriteFile(path+".crt", certificate, 0o644); err != nil {
		return nil, nil, err
	}
	return certificate, key, os.WriteFile(path+".key", key, 0o600)
}

func kubeconfig(server string, authority, certificate, key []byte) []byte {
	text := base64.StdEncoding.EncodeToString
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: user, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
`, server, text(authority), text(certificate), text(key))
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
