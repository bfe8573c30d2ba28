#!/bin/sh
# usage: kernel-log.sh DIRECTORY
# Follows the kernel's journal and keeps its lines about GPUs, PCIe and memory in DIRECTORY/kernel.log, which the service's
# container sees read-only: a crash there is then told with its cause out here. Needs journalctl, and grep with
# --line-buffered (GNU, busybox).
set -eu

directory=$1
log=$directory/kernel.log
largest=1000000 # bytes; the file before it is kept as well

# NVIDIA's driver, AER and hot-plug of PCIe, the out-of-memory killer with its table of processes left out, the IOMMU.
lines='NVRM: |nvidia-|AER: |PCIe Bus Error|pcieport .*(DPC|Link Down|Surprise)|pciehp|Out of memory: |oom-kill:|Memory cgroup out of memory|DMAR: .*fault|AMD-Vi: .*(FAULT|Event logged)|Machine check|mce: .*Hardware Error'

umask 022
# The journal holds the whole boot, so this begins anew and has each line once.
: >"$log"
journalctl --dmesg --follow --lines=all --no-hostname --utc --output=short-iso-precise \
  | grep --line-buffered --extended-regexp --regexp="$lines" \
  | while IFS= read -r line; do
      if [ "$(wc -c <"$log")" -gt "$largest" ]; then mv -- "$log" "$log.1"; fi
      printf '%s\n' "$line" >>"$log"
    done
# journalctl follows for ever; when it ends, systemd starts this again.
exit 1
