# shellcheck shell=sh
# usage: dracut.sh: makes each kernel's initramfs anew, under the name that the hooks of Debian's dracut give it.
for image in /boot/vmlinuz-*; do
  kernel=${image#/boot/vmlinuz-}
  # A rescue image of kernel-install has none.
  [ -d "/lib/modules/$kernel" ] || continue
  dracut --quiet --force "/boot/initrd.img-$kernel" "$kernel" || exit
  # systemd-boot starts copies.
  hook=/etc/kernel/postinst.d/zz-systemd-boot
  [ ! -x "$hook" ] || "$hook" "$kernel" "$image" || exit
done
