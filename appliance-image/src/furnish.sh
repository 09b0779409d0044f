dpkg --install /build/penstock.deb
dpkg-query --show --showformat '${Package} ${Version}\n' > /usr/share/penstock/packages
dpkg --purge --force-remove-essential apt

# Keys and names are each machine's own, in /var/lib/appliance.
rm -f /etc/ssh/ssh_host_* /etc/hostname
: > /etc/machine-id
passwd --lock root
ln -sf ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
mkdir -p /efi

systemctl enable systemd-networkd.service systemd-resolved.service systemd-timesyncd.service
systemctl enable penstock.service penstock-appliance.service penstock-first-boot.service \
    penstock-boot-check.service penstock-soft-roce.service penstock-nfs.socket
systemctl disable dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service nfs-server.service \
    nfs-client.target || true
# NFS is 4.2 alone, which asks nobody for a port. No shell without a credential.
systemctl mask rpcbind.service rpcbind.socket rpc-statd.service nfs-blkmap.service debug-shell.service

# It would listen on AF_VSOCK, too, whose hosts need no address to try keys.
mkdir -p /etc/systemd/system-generators
ln -s /dev/null /etc/systemd/system-generators/systemd-ssh-generator

# Files of Debian's installation that differ from build to build, or that nobody reads here.
find /usr/share/doc -mindepth 1 -maxdepth 1 ! -name penstock -exec rm -rf {} +
rm -rf /boot/* /etc/apt /usr/share/man /usr/share/bash-completion/completions/apt* \
    /etc/.pwd.lock /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid- \
    /root/.* 2>/dev/null || true
find /usr -name __pycache__ -prune -exec rm -rf {} +
