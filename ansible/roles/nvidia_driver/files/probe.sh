# shellcheck shell=sh
# What of a driver, and of what it needs, this host has, one NAME=VALUE a line. An empty value: not there.
say() { printf '%s=%s\n' "$1" "$2"; }

say uid "$(id -u)"
# `on` and `off`; empty where the host was not started by UEFI. The variable is one byte behind four of attributes.
variable=/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
if [ ! -e "$variable" ]; then secure_boot=''
elif [ "$(od -An -t u1 -j 4 -N 1 "$variable" | tr -d ' ')" = 1 ]; then secure_boot=on
else secure_boot=off
fi
say secure_boot "$secure_boot"
# NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.173.02  Release Build ..., or: NVIDIA UNIX x86_64 Kernel Module  535.288.01
version=$(sed -n 's/^NVRM version: *//p' /proc/driver/nvidia/version 2>/dev/null)
say loaded "$(printf '%s\n' "$version" | sed -n 's/.* \([0-9][0-9]*\.[0-9][0-9.]*\) .*/\1/p')"
case $version in '') say loaded_kind '' ;; *Open*) say loaded_kind open ;; *) say loaded_kind proprietary ;; esac
# The persistence daemon is the driver's own, and goes with it.
say users "$(find /proc/[0-9]*/fd -lname '/dev/nvidia[0-9]*' 2>/dev/null | cut -d / -f 3 | sort -nu | while read -r process; do
  name=$(cat "/proc/$process/comm" 2>/dev/null) || continue
  [ "$name" = nvidia-persiste ] || echo "$name ($process)"
done | paste -s -d ',' | sed 's/,/, /g')"
say nouveau "$([ ! -d /sys/module/nouveau ] || echo loaded)"
# NVIDIA's own installer brings its remover, which is no package's.
runfile=$(command -v nvidia-uninstall)
[ -z "$runfile" ] || ! dpkg-query --search "$runfile" >/dev/null 2>&1 || runfile=''
say runfile "$runfile"
# Apt refuses to read its sources where two of them name one repository and different keys.
say sources "$(grep -lsE '^[^#]*/compute/cuda/repos/' /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null \
  | grep -v /aerie-nvidia.sources | paste -s -d ' ')"
# Which of them makes it: dracut-core may be there beside initramfs-tools, dracut may not.
initramfs=$(command -v update-initramfs || command -v dracut)
say initramfs "${initramfs##*/}"
for directory in "$@"; do
  say "free $directory" "$(df -Pk "$directory" | awk 'NR == 2 { print int($4 * 1.024 / 1000) }')"
done
