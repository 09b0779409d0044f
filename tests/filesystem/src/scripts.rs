//! What guests do with a tree that is mounted at /mnt.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::Vm;

/// A script under TCG on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// What POSIX says of a tree, in the order in which things would go wrong.
pub const TREE: &str = r#"
cd /mnt
mkdir -p a/b/c
echo one > a/one
cp a/one a/b/two
cmp a/one a/b/two
[ "$(stat -c '%s %h %F' a/one)" = "4 1 regular file" ]
ln a/one a/three
[ "$(stat -c %h a/one)" = 2 ]
rm a/one
[ "$(cat a/three)" = one ]
ln -s ../three a/b/link
[ "$(cat a/b/link)" = one ]
[ "$(readlink a/b/link)" = ../three ]
mv a/b/two a/moved
[ ! -e a/b/two ]
[ -e a/moved ]
# Whether that is an error depends on the version.
mv -n a/moved a/three || true
[ "$(cat a/three)" = one ]
chmod 4711 a/moved
[ "$(stat -c %a a/moved)" = 4711 ]
chown 7:8 a/moved
[ "$(stat -c %u:%g a/moved)" = 7:8 ]
mknod a/pipe p
[ "$(stat -c %F a/pipe)" = fifo ]
fails rmdir a
rmdir a/b/c
fails cat a/none
fails mkdir a
touch -d '2001-02-03 04:05:06' a/three
[ "$(stat -c %Y a/three)" = "$(date -d '2001-02-03 04:05:06' +%s)" ]
/usr/bin/setfattr -n user.colour -v blue a/three
[ "$(/usr/bin/getfattr --only-values -n user.colour a/three)" = blue ]
fails /usr/bin/setfattr -n user.$(printf %0300d 1) -v x a/three
/usr/bin/setfattr -x user.colour a/three
fails /usr/bin/getfattr -n user.colour a/three

for i in $(seq 1000); do echo > a/b/file$i; done
[ "$(ls a/b | wc -l)" = 1001 ]
rm a/b/file5*
[ "$(ls a/b | wc -l)" = 890 ]

echo -n 0123456789 > data
echo -n abc >> data
[ "$(cat data)" = 0123456789abc ]
truncate -s 5 data
[ "$(cat data)" = 01234 ]
truncate -s 100000 data
[ "$(tail -c 1 data | od -An -tx1)" = " 00" ]
fallocate -l 300000 data
[ "$(stat -c %s data)" = 300000 ]
exec 5< data
rm data
[ "$(dd bs=5 count=1 <&5 2> /dev/null)" = 01234 ]
exec 5<&-
df /mnt | grep -q tree
"#;

/// Writes whole and reads back, with requests of up to 1 MiB past the guest's cache and in it.
pub const DATA: &str = r"
for direct in 0 1; do
    for bs in 4k 1m; do
        fio --name=data --filename=/mnt/data$direct$bs --size=24m --bs=$bs --direct=$direct --rw=randwrite \
            --verify=crc32c --iodepth=16 --ioengine=libaio --end_fsync=1 > /run/fio 2>&1 ||
            { cat /run/fio; exit 1; }
    done
done
sum=$(cat /mnt/data* | md5sum)
umount /mnt
mount -t virtiofs tree /mnt
[ $(cat /mnt/data* | md5sum | cut -d' ' -f1) = ${sum%% *} ]
rm -r /mnt/*
umount /mnt
";

/// What scripts of [`passes`] begin with. The first command that fails ends them; a list of commands with
/// `&&` or `||` does so by its last one only, and one that begins with `!` never does: hence `fails`.
const STRICT: &str = "set -ex
fails() { ! \"$@\" 2> /dev/null; }";

/// Runs a script each of whose commands must end well; what it did is quoted otherwise.
pub fn passes(vm: &mut Vm, script: &str) -> Result<()> {
    passes_within(vm, script, LIMIT)
}

/// The same with a limit of its own.
pub fn passes_within(vm: &mut Vm, script: &str, limit: Duration) -> Result<()> {
    let output = vm.run(&format!("{STRICT}\n{script}"), limit)?;
    ensure!(output.code == 0, "{}", output.text);
    Ok(())
}

/// Starts a program in the guest; [`ended`] waits for it.
pub fn in_background(vm: &mut Vm, program: &str) -> Result<()> {
    vm.sh(&format!(
        "({program} > /run/said 2>&1; echo $? > /run/code) > /dev/null 2>&1 &"
    ))
    .map(drop)
}

/// Waits until the program that [`in_background`] started has made its mark; what it said is quoted
/// otherwise.
pub fn has_marked(vm: &mut Vm, mark: &str) -> Result<()> {
    let marked = vm.sh_until(&format!("test -e {mark}"), LIMIT);
    marked.with_context(|| format!("{:?}", vm.sh("cat /run/said")))?;
    Ok(())
}

/// The program that [`in_background`] started has ended well.
pub fn ended(vm: &mut Vm) -> Result<()> {
    vm.sh_until("test -s /run/code", LIMIT)?;
    passes(vm, "cat /run/said\n[ $(cat /run/code) = 0 ]\nrm /run/code")
}
