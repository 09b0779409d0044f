#!/bin/sh
# Written by `penstock libvirt hook install`, removed by `penstock libvirt hook remove`.
#
# libvirt runs this when a domain starts and ends, with the domain's XML on standard input. Penstock attaches
# the volumes that the domain needs before it starts, and detaches them after it has ended.
penstock=@PENSTOCK@
if [ ! -x "$penstock" ]; then
    # Without the program no domain has a Penstock disk, and the others must start.
    echo "penstock: $penstock is gone; remove this hook: $0" >&2
    exit 0
fi
if [ "$2" = reconnect ]; then
    # libvirt has restarted and found a running domain. If this fails for any reason, libvirt kills it.
    "$penstock"@OPTIONS@ libvirt hook run -- "$@"
    exit 0
fi
exec "$penstock"@OPTIONS@ libvirt hook run -- "$@"
