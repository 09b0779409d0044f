#!/bin/busybox sh
# First process of the rig's guest, in the initramfs and again on a root disk: loads the virtio drivers, then runs the
# scripts that come over the agent's virtio port, one at a time, and answers with exit status and output.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/busybox HOME=/root
BB=/bin/busybox
$BB mkdir -p /busybox /proc /sys /dev /run /tmp /mnt /root
$BB mount -t proc proc /proc
$BB mount -t sysfs sysfs /sys
$BB mount -t devtmpfs devtmpfs /dev
$BB mount -t tmpfs tmpfs /run
$BB mount -t tmpfs tmpfs /tmp
$BB --install -s /busybox
echo 3 > /proc/sys/kernel/printk

if [ -e /modules.load ]; then
    while read -r module; do insmod "/modules/$module" || echo "rig-init: cannot load $module"; done < /modules.load
fi

root=$(sed -n 's/.*rig\.root=\([^ ]*\).*/\1/p' /proc/cmdline)
if [ -n "$root" ] && [ -e /modules.load ]; then
    tries=0
    until [ -b "$root" ] || [ $tries -ge 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    mkdir -p /newroot
    mount -t ext4 "$root" /newroot || { echo "rig-init: cannot mount $root"; poweroff -f; }
    umount /proc /sys /run /tmp
    umount -l /dev
    exec switch_root /newroot /sbin/rig-init
fi

port=
tries=0
while [ -z "$port" ] && [ $tries -lt 100 ]; do
    for name in /sys/class/virtio-ports/*/name; do
        [ "$(cat "$name" 2>/dev/null)" = rig.agent ] && port=/dev/$(basename "$(dirname "$name")")
    done
    [ -n "$port" ] || sleep 0.1
    tries=$((tries + 1))
done
[ -c "$port" ] || { echo "rig-init: no agent port"; poweroff -f; }

exec 3<>"$port"
echo "rig-init: agent on $port"
printf '0 0 0\n' >&3
while read -r id script <&3; do
    printf '%s' "$script" | base64 -d > "/run/rig.$id"
    sh "/run/rig.$id" > "/run/rig.$id.out" 2>&1 < /dev/null 3>&-
    status=$?
    { printf '%s %s %s\n' "$id" "$status" "$(stat -c %s "/run/rig.$id.out")"; cat "/run/rig.$id.out"; } >&3
    rm -f "/run/rig.$id" "/run/rig.$id.out"
done
poweroff -f
