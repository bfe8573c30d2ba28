#!/bin/sh
# usage: kernel-log.sh DIRECTORY
# Follows the kernel's journal and keeps its lines about GPUs, PCIe and memory in DIRECTORY/kernel.log, which the service's
# container sees read-only: a crash there is then told with its cause out here. Needs journalctl, and grep with
# --line-buffered (GNU, busybox).
set -eu

directory=$1
log=$directory/kernel.log
largest=500000 # bytes; as much of what was before is kept

# NVIDIA's driver, AER and hot-plug of PCIe, the out-of-memory killer without its table of processes, faults that end a
# process, the IOMMU, machine checks.
lines='NVRM: |AER: |PCIe Bus Error|DPC: |Surprise|SDES|pciehp|Link Down|Out of memory: |out of memory: |oom-kill:|invoked oom-killer|segfault at |general protection|traps: |DMAR: .*fault|AMD-Vi: .*(FAULT|Event logged)|Machine check|Hardware Error'

umask 022
# The journal holds the whole boot, so this begins anew and has each line once.
: >"$log"
rm -f -- "$log.1"
journalctl --dmesg --follow --lines=all --no-hostname --utc --output=short-iso-precise \
  | grep --line-buffered --extended-regexp --regexp="$lines" \
  | {
    size=0
    while IFS= read -r line; do
      # The older half stays as kernel.log.1.
      if [ "$size" -gt "$largest" ]; then
        mv -- "$log" "$log.1"
        size=0
      fi
      printf '%s\n' "$line" >>"$log"
      size=$((size + ${#line} + 1))
    done
  }
# journalctl follows for ever; when it ends, systemd starts this again.
exit 1
