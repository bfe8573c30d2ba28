#!/bin/sh
# usage: packages.sh DIRECTORY DISTRIBUTION...
# Lays out below DIRECTORY, as the vendor lays out its own, signed repositories of stand-in packages, and signs them with a new key:
#
#   DIRECTORY/<distribution>/x86_64/               the driver's, for debian12, debian13, ubuntu2204 or ubuntu2404, each with its
#                                                  key's file under the vendor's name; two releases of branch 580, one of 595
#   DIRECTORY/libnvidia-container/gpgkey           the container toolkit's, below stable/deb/amd64/
#   DIRECTORY/kernel/                              what a distribution offers: a kernel that is newer than the running one
#                                                  (DIRECTORY/kernel/next has its name), and headers for both
#   DIRECTORY/stub.sources                         an apt source for the last
#   DIRECTORY/fingerprint                          of the key
#
# No package holds anything of NVIDIA's. The driver's kernel module is a C file of four strings, built by the real dkms; it can be
# asked for its version and licence, and loaded by no kernel. The programs answer from /proc/driver/nvidia and from the described
# machine below /srv/stub-machine, or as the real ones do where no driver is loaded.
set -eu

root=$1
shift
if ! command -v gpg >/dev/null; then
  apt-get -q update
  DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends gpg gpg-agent
fi
# Not /tmp, which systemd empties while it starts.
work=$(mktemp -d -p /var/tmp)
trap 'gpgconf --kill all; rm -rf "$work"' EXIT
chmod 755 "$work"

mkdir -p "$root"
export GNUPGHOME="$work/gnupg"
mkdir -m 700 "$GNUPGHOME"
gpg --batch --quiet --passphrase '' --quick-generate-key stub@example.invalid ed25519 sign never
gpg --batch --with-colons --list-keys | awk -F: '$1 == "fpr" { print $10; exit }' >"$root/fingerprint"

# --- Building blocks --------------------------------------------------------------------------------------------------

# package NAME VERSION FIELD...: a tree for the package, whose path is then in $tree. A FIELD is a line of its control file.
package() {
  tree=$work/tree
  rm -rf "$tree"
  mkdir -p "$tree/DEBIAN"
  {
    echo "Package: $1"
    echo "Version: $2"
    shift 2
    printf '%s\n' "Architecture: amd64" "Maintainer: Nobody <nobody@example.invalid>" "$@"
    echo "Description: a stand-in for tests, with nothing of its vendor's in it"
  } >"$tree/DEBIAN/control"
}
# program PATH: an executable in the tree, from standard input.
program() {
  mkdir -p "$tree/$(dirname "$1")"
  cat >"$tree/$1"
  chmod 755 "$tree/$1"
}
file() {
  mkdir -p "$tree/$(dirname "$1")"
  cat >"$tree/$1"
}
maintainer_script() {
  cat >"$tree/DEBIAN/$1"
  chmod 755 "$tree/DEBIAN/$1"
}
# put DIRECTORY: build the tree's package into it.
put() {
  mkdir -p "$1"
  dpkg-deb -Znone --root-owner-group --build "$tree" "$1" >/dev/null
}
# index DIRECTORY ORIGIN: make it a flat, signed repository.
index() {
  (
    cd "$1"
    for deb in *.deb; do
      dpkg-deb --field "$deb"
      printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$deb" "$(stat -c %s "$deb")" "$(sha256sum <"$deb" | cut -d ' ' -f 1)"
    done >Packages
    {
      printf 'Origin: %s\nLabel: %s\nDate: %s\nSHA256:\n' "$2" "$2" "$(date -Ru | sed 's/+0000/UTC/')"
      printf ' %s %s Packages\n' "$(sha256sum <Packages | cut -d ' ' -f 1)" "$(stat -c %s Packages)"
    } | gpg --batch --quiet --yes --clearsign --output InRelease
  )
}

# --- The driver -------------------------------------------------------------------------------------------------------

nvidia_smi() {
  program usr/bin/nvidia-smi <<'EOT'
#!/bin/sh
# A stand-in. A described machine says itself what nvidia-smi would.
tree=/srv/stub-machine/driver/nvidia-smi
version=$(sed -n 's/^NVRM version:.* \([0-9]*\.[0-9.]*\) .*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
if [ -z "$version" ]; then
  echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."
  exit 9
fi
case "$*" in
  '-q -x') exec cat "$tree/q.xml" ;;
  'topo -m') exec cat "$tree/topo" ;;
  -L) exec cat "$tree/list" ;;
  '') echo "NVIDIA-SMI $version  Driver Version: $version" ;;
  '-pm 1') touch /run/stub-persistence-mode ;;
  *driver_version*) for gpu in /proc/driver/nvidia/gpus/*/; do [ ! -d "$gpu" ] || echo "$version"; done ;;
  *) echo "stub nvidia-smi: no answer to: $*" >&2; exit 2 ;;
esac
EOT
}

nvidia_modprobe() {
  printf '%s\n' '#!/bin/sh' 'echo "$*" >>/run/stub-nvidia-modprobe' | program usr/bin/nvidia-modprobe
}

# persistenced [INSTALL]: the daemon and its unit, which Debian's package enables and Ubuntu's cannot.
persistenced() {
  program usr/bin/nvidia-persistenced <<'EOT'
#!/bin/sh
exec sleep infinity
EOT
  {
    printf '%s\n' '[Unit]' 'Description=Stand-in for the persistence daemon' '[Service]' 'ExecStart=/usr/bin/nvidia-persistenced'
    [ "$1" = static ] || printf '%s\n' '[Install]' 'WantedBy=multi-user.target'
  } | file usr/lib/systemd/system/nvidia-persistenced.service
}

# dkms_source VERSION LICENSE: what dkms builds. The licence is what tells the open modules from the others.
dkms_source() {
  file "usr/src/nvidia-$1/dkms.conf" <<EOT
PACKAGE_NAME="nvidia"
PACKAGE_VERSION="$1"
MAKE[0]="sh build.sh \$kernelver"
CLEAN="true"
AUTOINSTALL="yes"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_LOCATION[0]="/updates/dkms"
BUILT_MODULE_NAME[1]="nvidia-uvm"
DEST_MODULE_LOCATION[1]="/updates/dkms"
EOT
  file "usr/src/nvidia-$1/build.sh" <<EOT
set -e
for module in nvidia nvidia-uvm; do
  # A host on which a build must fail says so.
  [ ! -e "/etc/stub-build-fails-for-\$1" ] || { echo "stub.c:1: error: the kernel \$1 has no such function" >&2; exit 1; }
  printf 'static const char info[] __attribute__((section(".modinfo"), used)) =\n "license=$2\\\\0version=$1\\\\0name=%s\\\\0vermagic=%s SMP mod_unload";\n' \\
    "\$(echo "\$module" | tr - _)" "\$1" >stub.c
  gcc -c -o "\$module.ko" stub.c
done
EOT
  # As dh_dkms has it.
  maintainer_script postinst <<EOT
#!/bin/sh
set -e
[ "\$1" != configure ] || /usr/lib/dkms/common.postinst nvidia "$1" /usr/share/nvidia "" "\$2"
EOT
  maintainer_script prerm <<EOT
#!/bin/sh
set -e
dkms remove -m nvidia -v "$1" --all || true
EOT
}

# pinning BRANCH|VERSION REPOSITORY: with it installed, apt knows no other one.
pinning() {
  package "nvidia-driver-pinning-$1" "$1-1"
  file "etc/apt/preferences.d/nvidia-driver-pinning-$1.pref" <<EOT
Package: *nvidia* libcuda1 cuda-drivers*
Pin: version $1$(case $1 in *.*) echo - ;; *) echo . ;; esac)*
Pin-Priority: 1000
EOT
  echo "/etc/apt/preferences.d/nvidia-driver-pinning-$1.pref" >"$tree/DEBIAN/conffiles"
  put "$2"
}

# driver_debian BRANCH VERSION REPOSITORY
driver_debian() {
  package nvidia-kernel-open-dkms "$2-1" "Depends: dkms, nvidia-modprobe" "Conflicts: nvidia-kernel-dkms"
  dkms_source "$2" 'Dual MIT/GPL'
  put "$3"
  package nvidia-kernel-dkms "$2-1" "Depends: dkms" "Conflicts: nvidia-kernel-open-dkms"
  dkms_source "$2" 'NVIDIA'
  put "$3"
  package nvidia-driver-cuda "$2-1" "Depends: libcuda1 (= $2-1), nvidia-modprobe" "Recommends: nvidia-persistenced"
  nvidia_smi
  put "$3"
  package libcuda1 "$2-1"
  put "$3"
  package nvidia-modprobe "$2-1"
  nvidia_modprobe
  put "$3"
  package nvidia-persistenced "$2-1"
  persistenced enabled
  put "$3"
}

# driver_ubuntu BRANCH VERSION REPOSITORY: up to 580 the branch is a part of the names.
driver_ubuntu() {
  dash=-$1
  [ "$1" -le 580 ] || dash=''
  package "nvidia-dkms$dash-open" "$2-1ubuntu1" "Depends: dkms, nvidia-modprobe"
  dkms_source "$2" 'Dual MIT/GPL'
  put "$3"
  package "libnvidia-compute$dash" "$2-1ubuntu1"
  put "$3"
  package "libnvidia-cfg1$dash" "$2-1ubuntu1"
  put "$3"
  if [ -n "$dash" ]; then
    package "nvidia-utils$dash" "$2-1ubuntu1" "Depends: libnvidia-compute$dash (= $2-1ubuntu1)"
    nvidia_smi
    put "$3"
    package "nvidia-compute-utils$dash" "$2-1ubuntu1" "Depends: libnvidia-cfg1$dash"
    persistenced static
    put "$3"
  else
    package nvidia-driver-cuda "$2-1ubuntu1" "Depends: libnvidia-compute (= $2-1ubuntu1)"
    nvidia_smi
    put "$3"
    package nvidia-persistenced "$2-1ubuntu1" "Depends: libnvidia-cfg1"
    persistenced enabled
    put "$3"
  fi
  package nvidia-modprobe "$2-1ubuntu1"
  nvidia_modprobe
  put "$3"
}

for distribution; do
  repository=$root/$distribution/x86_64
  case $distribution in
    debian12) family=debian key=3bf863cc.pub ;;
    debian13) family=debian key=8793F200.pub ;;
    ubuntu2204|ubuntu2404) family=ubuntu key=3bf863cc.pub ;;
    *) echo "packages.sh: $distribution is none of debian12, debian13, ubuntu2204, ubuntu2404" >&2; exit 1 ;;
  esac
  for version in 580.159.03 580.173.02 595.71.05; do
    "driver_$family" "${version%%.*}" "$version" "$repository"
    pinning "$version" "$repository"
  done
  pinning 580 "$repository"
  pinning 595 "$repository"
  index "$repository" NVIDIA
  gpg --armor --export >"$repository/$key"
done

# --- The container toolkit --------------------------------------------------------------------------------------------

# The programs do what the real ones do that the roles depend on: from the nodes that are there, nvidia-ctk writes a specification
# that Docker reads, and says what can be resolved; the units of the same names have it do so; and the hook adds the nodes to a
# container behind systemd's back, as the legacy one does (https://github.com/NVIDIA/nvidia-container-toolkit/issues/48).
nvidia_ctk() {
  {
    printf '%s\n' '#!/bin/sh' "version=$1"
    cat <<'EOT'
specification=/var/run/cdi/nvidia.yaml
generate() {
  if [ ! -e /proc/driver/nvidia/version ]; then
    echo "failed to generate CDI spec: failed to initialize NVML: Driver Not Loaded" >&2
    exit 1
  fi
  mkdir -p /var/run/cdi /run/stub-cdi
  # Within a container there is nothing for nvidia-smi to ask.
  echo '#!/bin/sh' >/run/stub-cdi/nvidia-smi
  chmod 755 /run/stub-cdi/nvidia-smi
  all=''
  names=''
  for information in /proc/driver/nvidia/gpus/*/information; do
    [ -e "$information" ] || continue
    number=$(sed -n 's/^Device Minor:[^0-9]*\([0-9]*\).*/\1/p' "$information")
    [ -c "/dev/nvidia$number" ] || continue
    echo "echo 'GPU $number: a stand-in'" >>/run/stub-cdi/nvidia-smi
    node=$(printf '    - path: /dev/nvidia%s\n.' "$number")
    node=${node%.}
    names="$names- name: \"$number\"
  containerEdits:
    deviceNodes:
$node"
    all="$all$node"
  done
  {
    printf -- '---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n%s' "$names"
    printf -- '- name: all\n  containerEdits:\n    deviceNodes:\n%s' "$all"
    printf 'containerEdits:\n  deviceNodes:\n'
    for node in nvidiactl nvidia-uvm nvidia-uvm-tools; do
      [ ! -c "/dev/$node" ] || echo "  - path: /dev/$node"
    done
    printf '  mounts:\n  - hostPath: /run/stub-cdi/nvidia-smi\n    containerPath: /usr/bin/nvidia-smi\n    options: [ro, nosuid, nodev, bind]\n'
  } >"$specification.new"
  mv "$specification.new" "$specification"
}
case $* in
  --version|version) echo "NVIDIA Container Toolkit CLI version $version" ;;
  'cdi generate') generate ;;
  'cdi list')
    names=$(cat /etc/cdi/*.yaml /var/run/cdi/*.yaml 2>/dev/null | sed -n 's/^- name: "*\([^"]*\)"*$/nvidia.com\/gpu=\1/p' | sort -u)
    echo "INFO[0000] Found $(echo "$names" | grep -c .) CDI devices" >&2
    [ -z "$names" ] || echo "$names"
    ;;
  *config*) ;;
  *) echo "stub nvidia-ctk: no answer to: $*" >&2; exit 2 ;;
esac
EOT
  } | program usr/bin/nvidia-ctk
}

cdi_refresh_units() {
  file lib/systemd/system/nvidia-cdi-refresh.service <<'EOT'
[Unit]
Description=Stand-in for the unit that writes the CDI specification
ConditionPathExists=/usr/bin/nvidia-smi
StartLimitBurst=5
StartLimitIntervalSec=10s
[Service]
Type=oneshot
ExecStart=/usr/bin/nvidia-smi -L
ExecStart=/usr/bin/nvidia-ctk cdi generate
Restart=on-failure
RestartSec=1s
[Install]
WantedBy=multi-user.target
EOT
  file lib/systemd/system/nvidia-cdi-refresh.path <<'EOT'
[Unit]
Description=Stand-in for the unit that has it written when modules change
[Path]
PathChanged=/lib/modules/%v/modules.dep
PathChanged=/usr/bin/nvidia-ctk
[Install]
WantedBy=multi-user.target
EOT
  maintainer_script postinst <<'EOT'
#!/bin/sh
set -e
mkdir -p /etc/nvidia-container-runtime
[ -e /etc/nvidia-container-runtime/config.toml ] || echo '# a stand-in' >/etc/nvidia-container-runtime/config.toml
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl enable nvidia-cdi-refresh.path nvidia-cdi-refresh.service
  systemctl start nvidia-cdi-refresh.path || true
  systemctl start nvidia-cdi-refresh.service || true
fi
EOT
  maintainer_script prerm <<'EOT'
#!/bin/sh
set -e
[ "$1" != remove ] || [ ! -d /run/systemd/system ] || systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service
EOT
}

runtime_hook() {
  program usr/bin/nvidia-container-runtime-hook <<'EOT'
#!/usr/bin/python3
# Docker runs it as the container is made, for `--gpus`. It permits the nodes in the container's device cgroup (version 1), which
# systemd knows nothing of, and makes them.
import json, os, subprocess, sys
if sys.argv[1:] == ["prestart"]:
    state = json.load(sys.stdin)
    with open(state["bundle"] + "/config.json") as file:
        root = json.load(file)["root"]["path"]
    with open(f"/proc/{state['pid']}/cgroup") as file:
        groups = dict(line.strip().split(":", 2)[1:] for line in file)
    for name in sorted(os.listdir("/dev")):
        if name.startswith("nvidia"):
            number = os.stat(f"/dev/{name}").st_rdev
            major, minor = os.major(number), os.minor(number)
            with open(f"/sys/fs/cgroup/devices{groups['devices']}/devices.allow", "w") as file:
                file.write(f"c {major}:{minor} rwm")
            node = f"/proc/{state['pid']}/root{root}/dev/{name}"
            subprocess.run(["mknod", "-m", "666", node, "c", str(major), str(minor)], check=True)
EOT
}

repository=$root/libnvidia-container/stable/deb/amd64
for version in 1.19.1 1.20.0; do
  package nvidia-container-toolkit-base "$version-1"
  nvidia_ctk "$version"
  cdi_refresh_units
  printf '%s\n' '#!/bin/sh' 'exec runc "$@"' | program usr/bin/nvidia-container-runtime
  printf '%s\n' '#!/bin/sh' 'exit 0' | program usr/bin/nvidia-cdi-hook
  put "$repository"
  package nvidia-container-toolkit "$version-1" "Depends: nvidia-container-toolkit-base (= $version-1), libnvidia-container-tools (= $version-1)"
  runtime_hook
  put "$repository"
  package libnvidia-container-tools "$version-1" "Depends: libnvidia-container1 (= $version-1)"
  printf '%s\n' '#!/bin/sh' 'exit 0' | program usr/bin/nvidia-container-cli
  put "$repository"
  package libnvidia-container1 "$version-1"
  put "$repository"
done
index "$repository" nvidia-container-toolkit
gpg --armor --export >"$root/libnvidia-container/gpgkey"

# --- The distribution's kernels ---------------------------------------------------------------------------------------

repository=$root/kernel
running=$(uname -r)
next=99.0.0-1-amd64
headers() {
  # The compiler comes with the headers, as in every distribution.
  package "linux-headers-$1" 99 "Depends: gcc"
  mkdir -p "$tree/lib/modules/$1" "$tree/usr/src/linux-headers-$1/include"
  echo 'CONFIG_MODULES=y' >"$tree/usr/src/linux-headers-$1/.config"
  : >"$tree/usr/src/linux-headers-$1/Makefile"
  ln -s "/usr/src/linux-headers-$1" "$tree/lib/modules/$1/build"
  # dkms takes a kernel without any module of its own for one that was removed. And what a kernel's hook does for dkms.
  maintainer_script postinst <<EOT
#!/bin/sh
mkdir -p "/lib/modules/$1/kernel"
echo 'int own;' | gcc -x c -c -o "/lib/modules/$1/kernel/own.ko" - && depmod "$1" || true
[ ! -x /usr/lib/dkms/dkms_autoinstaller ] || /usr/lib/dkms/dkms_autoinstaller start "$1" >/dev/null 2>&1 || true
EOT
  put "$repository"
}
headers "$running"
headers "$next"
package "linux-image-$next" 99 "Depends: kmod"
mkdir -p "$tree/boot" "$tree/lib/modules/$next/kernel"
: >"$tree/boot/vmlinuz-$next"
echo CONFIG_RD_GZIP=y >"$tree/boot/config-$next"
: >"$tree/lib/modules/$next/modules.builtin.modinfo"
: >"$tree/lib/modules/$next/modules.order"
: >"$tree/lib/modules/$next/modules.builtin"
maintainer_script postinst <<EOT
#!/bin/sh
depmod "$next" 2>/dev/null
EOT
put "$repository"
package linux-image-amd64 99 "Depends: linux-image-$next"
put "$repository"
package linux-headers-amd64 99 "Depends: linux-headers-$next"
put "$repository"
index "$repository" Distribution
echo "$next" >"$repository/next"
gpg --armor --export >"$repository/key.asc"
cat >"$root/stub.sources" <<EOT
Types: deb
URIs: file:$repository
Suites: ./
Signed-By: $repository/key.asc
EOT
