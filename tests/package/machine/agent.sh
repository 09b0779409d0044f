#!/bin/sh
# Runs the scripts that come over the rig's virtio port, one at a time, and answers with exit status and output; the
# protocol is that of the rig's first process in tests/guest/guest/init.sh.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
port=
while [ -z "$port" ]; do
    for name in /sys/class/virtio-ports/*/name; do
        [ "$(cat "$name" 2>/dev/null)" = rig.agent ] && port=/dev/$(basename "$(dirname "$name")")
    done
    [ -n "$port" ] || sleep 0.1
done
until [ -c "$port" ]; do sleep 0.1; done

exec 3<>"$port"
printf '0 0 0\n' >&3
while read -r id script <&3; do
    printf '%s' "$script" | base64 -d > "/run/rig.$id"
    sh "/run/rig.$id" > "/run/rig.$id.out" 2>&1 < /dev/null 3>&-
    status=$?
    { printf '%s %s %s\n' "$id" "$status" "$(stat -c %s "/run/rig.$id.out")"; cat "/run/rig.$id.out"; } >&3
    rm -f "/run/rig.$id" "/run/rig.$id.out"
done
