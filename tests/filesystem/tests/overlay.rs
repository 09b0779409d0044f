//! Guests use a tree as the upper directory of an overlay filesystem, as container runtimes do.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use filesystem_rig::scripts::{TREE, passes};
use filesystem_rig::{LINUX_6_12, PROGRAM_NAME as NAME, RECIPE, attach, boot_of, gives_back};
use guest_rig::{Daemon, Recipe, Vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
const MOUNT: &str = "mount -t virtiofs tree /mnt";

/// Makes the lower layer in the working directory.
const LOWER: &str = "
mkdir -p a/b gone moved/inside
for name in one two again replaced file b/deep; do echo $name > a/$name; done
echo x > gone/x
echo inside > moved/inside/file
head -c 300000 /dev/urandom > big
ln -s a/one symlink
echo linked > link1
ln link1 link2
";

/// Changes the overlay at /run/merged, and checks it and its upper layer. `$lower` is the lower layer.
const CHANGES: &str = r#"
whiteout() { [ "$(stat -c '%F %t:%T %a' /mnt/upper/$1)" = "character special file 0:0 0" ]; }
overlay() { /usr/bin/getfattr --only-values -n trusted.overlay.$1 /mnt/upper/$2; }
cd /run/merged

# What is changed is copied up.
echo more >> a/two
[ "$(cat a/two | tr '
' ,)" = two,more, ]
[ "$(cat $lower/a/two)" = two ]
chmod 4711 a/b/deep
[ "$(stat -c %a /mnt/upper/a/b/deep)" = 4711 ]
echo x >> big
[ "$(stat -c %s big)" = 300002 ]
head -c 300000 big | cmp - $lower/big
/usr/bin/setfattr -n user.colour -v blue a/two
[ "$(/usr/bin/getfattr --only-values -n user.colour a/two)" = blue ]

# What is removed is hidden by whiteouts.
rm a/one
fails cat a/one
whiteout a/one
fails cat symlink
rm a/again
echo new > a/again
[ "$(cat a/again)" = new ]
[ -f /mnt/upper/a/again ]
echo t > t
rm t
[ ! -e /mnt/upper/t ]

# A directory that is made in the place of a removed one shows nothing of it.
rm -r gone
whiteout gone
mkdir gone
[ -z "$(ls -A gone)" ]
[ "$(overlay opaque gone)" = y ]
echo back > gone/back

# Files and directories are renamed, also over others.
mv a/file a/renamed
whiteout a/file
[ "$(cat a/renamed)" = file ]
mv a/b/deep a/replaced
whiteout a/b/deep
[ "$(cat a/replaced)" = b/deep ]
[ "$(ls a | tr '
' ,)" = again,b,renamed,replaced,two, ]
mv moved elsewhere
whiteout moved
fails ls moved
[ "$(cat elsewhere/inside/file)" = inside ]

# Names of one file stay names of one file.
ln a/two second
[ "$(stat -c %h second)" = 2 ]
echo last >> second
[ "$(tail -n 1 a/two)" = last ]
exec 5< second
rm second
[ "$(tail -n 1 <&5)" = last ]
exec 5<&-
[ "$(stat -c %h a/two)" = 1 ]
sync
"#;

/// Checks that redirect_dir=on and index=on hold, with both layers on one filesystem.
const LINKED_CHANGES: &str = r#"
[ "$(overlay redirect elsewhere)" = moved ]
[ ! -e /mnt/upper/elsewhere/inside ]
number=$(stat -c %i link1)
echo more >> link1
[ "$(cat link2 | tr '
' ,)" = linked,more, ]
[ "$(stat -c '%h %i' link2)" = "2 $number" ]
rm link1
[ "$(stat -c %h link2)" = 1 ]
number=$(stat -c %i elsewhere)
echo more >> elsewhere/inside/file
[ "$(stat -c %i elsewhere)" = $number ]
"#;

/// Prints what the overlay shows. Directories of two layers have a link count of 1.
const SHOW: &str = r#"
show() {
    (
        cd /run/merged
        find . -type d -exec stat -c '%n %a %u:%g %Y' {} \; | sort
        find . ! -type d -exec stat -c '%n %F %a %u:%g %h %s %Y' {} \; | sort
        find . -type f -exec md5sum {} \; | sort -k 2
    )
}
"#;

/// The layers of an overlay.
struct Layers {
    lower: &'static str,
    /// Mount options besides those that name the layers.
    options: &'static str,
    /// Changes and checks after [`CHANGES`].
    changes: &'static str,
}

const OVER_TMPFS: Layers = Layers {
    lower: "/run/lower",
    options: "",
    changes: "",
};

const OVER_THE_TREE: Layers = Layers {
    lower: "/mnt/lower",
    options: ",redirect_dir=on,index=on",
    changes: LINKED_CHANGES,
};

impl Layers {
    fn mount(&self) -> String {
        let Self { lower, options, .. } = self;
        format!(
            "mount -t overlay overlay -o lowerdir={lower},upperdir=/mnt/upper,workdir=/mnt/work{options} \
             /run/merged"
        )
    }

    /// Everything that is done with an overlay of these layers; the tree is empty before and after.
    fn go_through(&self, vm: &mut Vm) -> Result<()> {
        let Self { lower, changes, .. } = self;
        let mount = self.mount();
        passes(
            vm,
            &format!(
                "mkdir -p {lower} /run/merged /mnt/upper /mnt/work\ncd {lower}\n{LOWER}\ncd /\n{mount}"
            ),
        )?;
        no_complaints(vm)?;
        passes(vm, &format!("lower={lower}\n{CHANGES}\n{changes}"))?;
        passes(
            vm,
            &format!(
                "{SHOW}\nshow > /run/before\numount /run/merged\numount /mnt\n\
                 echo 3 > /proc/sys/vm/drop_caches\n{MOUNT}\n{mount}\n\
                 show > /run/after\ncmp /run/before /run/after\n[ $(wc -l < /run/after) -gt 20 ]"
            ),
        )?;
        no_complaints(vm)?;
        // What POSIX says of a tree is so in the overlay, too.
        passes(vm, &on_the_overlay())?;
        passes(
            vm,
            &format!("umount /run/merged\nrm -r {lower}/* /mnt/*\n[ -z \"$(ls -A /mnt)\" ]"),
        )
    }
}

/// [`TREE`], in a directory of the overlay.
fn on_the_overlay() -> String {
    let tree = TREE
        .replace(
            "cd /mnt\n",
            "mkdir /run/merged/posix\ncd /run/merged/posix\n",
        )
        // The overlay's own name.
        .replace("df /mnt | grep -q tree\n", "");
    assert!(
        !tree.contains("/mnt"),
        "nothing of it is outside of the overlay"
    );
    tree
}

/// The kernel takes the tree for all that an upper layer has to be.
fn no_complaints(vm: &mut Vm) -> Result<()> {
    let said = vm.sh("dmesg | grep overlayfs: || true")?;
    let complains = ["upper fs", "falling back", "missing", "failed"];
    let is_bad = complains.iter().any(|word| said.contains(word));
    ensure!(!is_bad, "{said}");
    Ok(())
}

fn serves_overlays(recipe: &Recipe, release: &str) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "4G", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let before = daemon.used_bytes()?;
    let tree = attach(&daemon, "tree", &[])?;
    let mut vm = boot_of(recipe, vec![tree], &[(Path::new(PROGRAM), NAME)])?;
    let running = vm.sh("uname -r")?;
    ensure!(running.starts_with(release), "{running}");
    vm.sh(MOUNT)?;
    passes(&mut vm, &format!("{NAME} upper /mnt"))?;
    passes(&mut vm, "mkdir /run/lower\nmount -t tmpfs lower /run/lower")?;
    OVER_TMPFS.go_through(&mut vm).context("over tmpfs")?;
    OVER_THE_TREE.go_through(&mut vm).context("over the tree")?;
    vm.sh("umount /mnt")?;
    vm.power_off()?;
    gives_back(&daemon, before)
}

#[test]
fn a_tree_is_the_upper_directory_of_an_overlay() -> Result<()> {
    serves_overlays(&RECIPE, "6.1.")
}

#[test]
fn a_tree_is_the_upper_directory_of_an_overlay_with_linux_6_12() -> Result<()> {
    serves_overlays(&LINUX_6_12, "6.12.")
}
