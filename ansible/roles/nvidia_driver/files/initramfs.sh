# shellcheck shell=sh
# usage: initramfs.sh FILE...: the kernels whose initramfs was made before one of the files was written.
for image in /boot/initrd.img-*; do
  kernel=${image#/boot/initrd.img-}
  # Without a kernel it is somebody's backup.
  [ -e "/boot/vmlinuz-$kernel" ] || continue
  for file; do
    if [ "$file" -nt "$image" ]; then echo "$kernel"; break; fi
  done
done
