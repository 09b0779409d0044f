//! What guests do with a tree that is mounted at /mnt.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_rig::Vm;

/// A script under TCG on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// What POSIX says of a tree, in the order in which things would go wrong.
pub const TREE: &str = r#"
set -e
cd /mnt
mkdir -p a/b/c && echo one > a/one && cp a/one a/b/two && cmp a/one a/b/two
[ "$(stat -c '%s %h %F' a/one)" = "4 1 regular file" ]
ln a/one a/three && [ "$(stat -c %h a/one)" = 2 ] && rm a/one && [ "$(cat a/three)" = one ]
ln -s ../three a/b/link && [ "$(cat a/b/link)" = one ] && [ "$(readlink a/b/link)" = ../three ]
mv a/b/two a/moved && [ ! -e a/b/two ] && [ -e a/moved ]
mv -n a/moved a/three && [ "$(cat a/three)" = one ]
chmod 4711 a/moved && [ "$(stat -c %a a/moved)" = 4711 ] && chown 7:8 a/moved
[ "$(stat -c %u:%g a/moved)" = 7:8 ]
mknod a/pipe p && [ "$(stat -c %F a/pipe)" = fifo ]
! rmdir a 2> /dev/null && rmdir a/b/c
! cat a/none 2> /dev/null && ! mkdir a 2> /dev/null
touch -d '2001-02-03 04:05:06' a/three && [ "$(stat -c %Y a/three)" = "$(date -d '2001-02-03 04:05:06' +%s)" ]
setfattr -n user.colour -v blue a/three && [ "$(getfattr --only-values -n user.colour a/three)" = blue ]
! setfattr -n user.$(printf %0300d 1) -v x a/three 2> /dev/null
setfattr -x user.colour a/three && ! getfattr -n user.colour a/three 2> /dev/null

for i in $(seq 1000); do echo > a/b/file$i; done
[ "$(ls a/b | wc -l)" = 1001 ]
rm a/b/file5*
[ "$(ls a/b | wc -l)" = 890 ]

echo -n 0123456789 > data && echo -n abc >> data && [ "$(cat data)" = 0123456789abc ]
truncate -s 5 data && [ "$(cat data)" = 01234 ] && truncate -s 100000 data
[ "$(tail -c 1 data | od -An -tx1)" = " 00" ]
fallocate -l 300000 data && [ "$(stat -c %s data)" = 300000 ]
exec 5< data && rm data && [ "$(dd bs=5 count=1 <&5 2> /dev/null)" = 01234 ] && exec 5<&-
df /mnt | grep -q tree
"#;

/// Writes whole and reads back, with requests of up to 1 MiB past the guest's cache and in it.
pub const DATA: &str = r"
set -e
for direct in 0 1; do
    for bs in 4k 1m; do
        fio --name=data --filename=/mnt/data$direct$bs --size=24m --bs=$bs --direct=$direct --rw=randwrite \
            --verify=crc32c --iodepth=16 --ioengine=libaio --end_fsync=1 > /run/fio 2>&1 ||
            { cat /run/fio; exit 1; }
    done
done
sum=$(cat /mnt/data* | md5sum)
umount /mnt && mount -t virtiofs tree /mnt
[ $(cat /mnt/data* | md5sum | cut -d' ' -f1) = ${sum%% *} ]
rm -r /mnt/*
umount /mnt
";

/// Runs a script that must end well; what it did is quoted otherwise.
pub fn passes(vm: &mut Vm, script: &str) -> Result<()> {
    passes_within(vm, script, LIMIT)
}

/// The same with a limit of its own.
pub fn passes_within(vm: &mut Vm, script: &str, limit: Duration) -> Result<()> {
    let output = vm.run(&format!("set -x\n{script}"), limit)?;
    ensure!(output.code == 0, "{}", output.text);
    Ok(())
}
