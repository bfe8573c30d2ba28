# shellcheck shell=sh
# usage: module.sh KERNEL: version and licence of the nvidia module that the kernel has; empty lines where it has none.
for field in version license; do modinfo -k "$1" -F "$field" nvidia 2>/dev/null || echo; done
