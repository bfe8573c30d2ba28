#!/bin/sh
# Lays out /srv/vendor as Docker's package repository is laid out, for one release of Debian, and signs it with a new key.
set -eu
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends apt-utils gnupg

release=$1
root=/srv/vendor/linux/debian
mkdir -p "$root/pool" "$root/dists/$release/stable/binary-amd64"

# rename FROM TO: Debian's package under the vendor's name, without what keeps the two apart.
rename() {
  work=$(mktemp -d)
  chmod 755 "$work"
  (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$1" && dpkg-deb --raw-extract "$1"_*.deb tree)
  sed -i "s/^Package: .*/Package: $2/; /^Depends:/s/containerd /containerd.io /; s/containerd.io (>= 1.4~)/containerd.io/
    /^\(Source\|Conflicts\|Breaks\|Replaces\|Provides\|Recommends\|Suggests\):/d" "$work/tree/DEBIAN/control"
  dpkg-deb -Znone --build "$work/tree" "$root/pool"
}
rename docker.io docker-ce
rename docker-cli docker-ce-cli
rename containerd containerd.io
rename docker-compose docker-compose-plugin
rename docker-buildx docker-buildx-plugin

cd "$root"
apt-ftparchive packages pool >"dists/$release/stable/binary-amd64/Packages"
apt-ftparchive -o "APT::FTPArchive::Release::Codename=$release" -o APT::FTPArchive::Release::Components=stable \
  -o APT::FTPArchive::Release::Architectures=amd64 release "dists/$release" >/tmp/Release
gpg --batch --passphrase '' --quick-generate-key vendor@example.invalid default default never
gpg --batch --clearsign --output "dists/$release/InRelease" /tmp/Release
gpg --armor --export --output ./gpg
