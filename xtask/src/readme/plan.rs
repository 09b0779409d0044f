//! The way in which each command block of the documents is run, or the reason why it is not.

use super::blocks::Block;
use super::scenes::Scene;

/// Documents whose command blocks are run.
pub const DOCUMENTS: [&str; 6] = [
    "README.md",
    "docs/INSTALL.md",
    "docs/APPLIANCE.md",
    "docs/LIBVIRT.md",
    "docs/NFS.md",
    "docs/OPERATIONS.md",
];

/// A command block and the way in which it is run.
#[derive(Debug)]
pub struct Entry {
    document: &'static str,
    heading: &'static str,
    /// Beginning of the block's first command.
    first: &'static str,
    /// Way in which the block is run.
    pub way: Way,
}

/// Way in which a block is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Typed at the machines of a scene. Takes seconds.
    Typed(Scene),
    /// Typed at a shell in the clone. Slow, so only in the long form.
    InClone,
    /// Typed by this test of this package, which `cargo xtask test` runs. The long form runs it too, because
    /// that command is in the README.
    Test(&'static str, &'static str),
    /// Not run, for this reason.
    Excepted(&'static str),
}

impl Entry {
    /// Returns whether the entry matches this block.
    pub fn is_of(&self, block: &Block) -> bool {
        let first = block.commands.first().map_or("", |one| one.text.as_str());
        self.document == block.document
            && self.heading == block.heading
            && first.starts_with(self.first)
    }
}

/// Returns the entry of a block, if it has exactly one.
pub fn entry_of(block: &Block) -> Option<&'static Entry> {
    let mut found = PLAN.iter().filter(|entry| entry.is_of(block));
    found.next().filter(|_| found.next().is_none())
}

/// Types the package's installation and INSTALL.md in a machine with systemd.
const PACKAGE: Way = Way::Test(
    "package-tests",
    "package_serves_guests_and_leaves_their_data",
);
/// Types LIBVIRT.md at a libvirtd.
const LIBVIRT: Way = Way::Test(
    "libvirt-tests",
    "the_commands_of_the_document_lead_to_a_guest_and_back",
);
const GROWS: Way = Way::Test(
    "cluster-tests",
    "a_node_alone_grows_and_its_disk_and_itself_are_replaced",
);
const RESTORED: Way = Way::Test(
    "cluster-tests",
    "metadata_come_back_from_a_backup_and_from_the_last_node",
);
const APPLIANCE: Way = Way::Excepted(
    "needs a machine that runs the appliance: `cargo xtask demo --appliance` does this with three of them",
);
const NFS: Way = Way::Excepted(
    "needs nfsd, VDUSE and addresses that move: \
     `a_client_sees_pauses_and_no_errors_whatever_happens_to_nfs_nodes` does this in virtual machines",
);
const IN_A_GUEST: Way = Way::Excepted(
    "typed in a guest: `two_guests_on_two_nodes_see_one_tree` mounts and unmounts a tree so",
);
const NOT_IN_DEBIAN: Way = Way::Excepted("needs a hypervisor that Debian does not package");

const fn entry(
    document: &'static str,
    heading: &'static str,
    first: &'static str,
    way: Way,
) -> Entry {
    Entry {
        document,
        heading,
        first,
        way,
    }
}

const fn readme(heading: &'static str, first: &'static str, way: Way) -> Entry {
    entry("README.md", heading, first, way)
}

const fn install(heading: &'static str, first: &'static str, way: Way) -> Entry {
    entry("docs/INSTALL.md", heading, first, way)
}

const fn appliance(heading: &'static str, first: &'static str, way: Way) -> Entry {
    entry("docs/APPLIANCE.md", heading, first, way)
}

const fn libvirt(heading: &'static str, first: &'static str, way: Way) -> Entry {
    entry("docs/LIBVIRT.md", heading, first, way)
}

const fn nfs(first: &'static str) -> Entry {
    entry("docs/NFS.md", "## From zero", first, NFS)
}

const fn operations(heading: &'static str, first: &'static str, way: Way) -> Entry {
    entry("docs/OPERATIONS.md", heading, first, way)
}

/// All blocks in the order of the documents.
pub const PLAN: &[Entry] = &[
    readme("## Install", "cargo xtask package", Way::InClone),
    readme("## Install", "sudo apt install", PACKAGE),
    readme("## Install", "cargo xtask demo", Way::InClone),
    readme(
        "## First disk",
        "penstock serve",
        Way::Typed(Scene::FirstDisk),
    ),
    readme(
        "## First disk",
        "qemu-system-x86_64",
        Way::Test(
            "cluster-tests",
            "the_first_disk_of_the_readme_is_served_to_a_guest",
        ),
    ),
    readme(
        "## First disk",
        "penstock volume resize",
        Way::Typed(Scene::FirstDisk),
    ),
    readme(
        "## First disk",
        "penstock volume show",
        Way::Typed(Scene::FirstDisk),
    ),
    readme(
        "## First disk",
        "penstock attach volume logs --block",
        Way::Excepted(
            "needs VDUSE or nbd of the kernel: `a_block_device_is_a_disk_to_the_node` does this in a \
             virtual machine",
        ),
    ),
    readme(
        "## First disk",
        "penstock detach",
        Way::Typed(Scene::FirstDisk),
    ),
    readme(
        "## Several nodes",
        "penstock init",
        Way::Typed(Scene::ThreeNodes),
    ),
    readme(
        "### When a node dies",
        "penstock node list",
        Way::Test(
            "cluster-tests",
            "the_nodes_of_the_readme_make_a_cluster_and_outlive_one",
        ),
    ),
    readme(
        "### When a node dies",
        "penstock node remove",
        Way::Test(
            "cluster-tests",
            "the_nodes_of_the_readme_make_a_cluster_and_outlive_one",
        ),
    ),
    readme("## Working on it", "cargo xtask test", Way::InClone),
    install("# Installing Penstock", "apt install", PACKAGE),
    install(
        "## A node of its own",
        "systemctl enable",
        Way::Typed(Scene::Installed),
    ),
    install(
        "## A node of a cluster",
        "penstock init",
        Way::Typed(Scene::InstalledCluster),
    ),
    install(
        "## A volume as a disk of the host",
        "penstock volume create logs",
        Way::Excepted(
            "needs systemd, and VDUSE or nbd of the kernel: the long form of \
             `package_serves_guests_and_leaves_their_data` types it",
        ),
    ),
    install("## More nodes on one machine", "cp /etc/penstock", PACKAGE),
    install(
        "## Removing",
        "apt remove",
        Way::Excepted(
            "removes a package of the host: `package_serves_guests_and_leaves_their_data` does this by dpkg",
        ),
    ),
    appliance("# The appliance", "minisign", APPLIANCE),
    appliance("## First boot", "qemu-system-x86_64", APPLIANCE),
    appliance("## On the console", "ssh", APPLIANCE),
    appliance(
        "## libvirt",
        "cp penstock-appliance",
        Way::Excepted(
            "needs an appliance's image, a libvirtd with a bridge, and minutes: tried by hand",
        ),
    ),
    appliance("## Updates", "scp", APPLIANCE),
    appliance("## Updates", "penstock update cluster", APPLIANCE),
    appliance("## Backup and disaster recovery", "ssh", APPLIANCE),
    appliance("## Support", "ssh", APPLIANCE),
    libvirt(
        "## From an empty host to a guest",
        "apt install",
        Way::Excepted(
            "installs packages on the host: `eight_commands_lead_from_the_package_to_a_confined_guest` does \
             this in a machine",
        ),
    ),
    libvirt(
        "## From an empty host to a guest",
        "systemctl enable",
        LIBVIRT,
    ),
    libvirt("## While the guest runs", "penstock volume create", LIBVIRT),
    libvirt("## Which volumes a domain uses", "virsh metadata", LIBVIRT),
    libvirt("## Undoing it", "virsh destroy", LIBVIRT),
    libvirt(
        "## Between hosts",
        "penstock attachment offer",
        BETWEEN_HOSTS,
    ),
    libvirt(
        "## Between hosts",
        "penstock attach volume web",
        BETWEEN_HOSTS,
    ),
    libvirt("## Between hosts", "virsh shutdown", BETWEEN_HOSTS),
    libvirt(
        "## Filesystems",
        "penstock fs create",
        Way::Typed(Scene::Installed),
    ),
    libvirt(
        "## What can go wrong",
        "mkdir -p /etc/apparmor.d",
        Way::Excepted(
            "changes AppArmor's rules of the host: \
             `eight_commands_lead_from_the_package_to_a_confined_guest` types it in a machine",
        ),
    ),
    libvirt(
        "## Plain QEMU",
        "qemu-system-x86_64",
        Way::Excepted(
            "boots nothing and needs KVM: `the_first_disk_of_the_readme_is_served_to_a_guest` types the \
             options with a guest",
        ),
    ),
    libvirt("## Cloud Hypervisor", "cloud-hypervisor", NOT_IN_DEBIAN),
    libvirt("## Proxmox VE", "qm set", NOT_IN_DEBIAN),
    nfs("apt install"),
    nfs("penstock nfs export create"),
    nfs("mount -t nfs"),
    operations(
        "## What is wrong, and what happened",
        "penstock health",
        Way::Typed(Scene::Operations),
    ),
    operations("## Filesystems", "penstock fs create", GROWS),
    operations("## Filesystems", "mount -t virtiofs", IN_A_GUEST),
    operations("## Filesystems", "penstock fs list", GROWS),
    operations("## Filesystems", "umount", GROWS),
    operations(
        "## Move a volume to another node",
        "penstock attachment move",
        Way::Excepted(
            "leaves the volume on another node than the next block: \
             `attachment_without_a_guest_moves_to_another_node` does this",
        ),
    ),
    operations(
        "## Make a cluster of a node that was alone",
        "systemctl stop",
        GROWS,
    ),
    operations("## Upgrade", "penstock health", GROWS),
    operations("## Replace a disk", "penstock device add", GROWS),
    operations("## Replace a node", "penstock token create", GROWS),
    operations(
        "## Evict a node",
        "penstock node remove",
        Way::Excepted(
            "needs a host that is not let in again: \
             `a_running_host_is_evicted_and_its_volume_is_attached_elsewhere` does this",
        ),
    ),
    operations(
        "## Change the address of a node",
        "penstock serve",
        Way::Excepted(
            "needs three nodes with new addresses: \
             `nodes_that_all_moved_find_each_other_by_one_address` does this",
        ),
    ),
    operations(
        "## A pool is full",
        "penstock health",
        Way::Typed(Scene::Operations),
    ),
    operations(
        "## Back the metadata up",
        "penstock meta backup",
        Way::Typed(Scene::Operations),
    ),
    operations(
        "## Back the metadata up",
        "penstock meta restore",
        Way::Typed(Scene::Operations),
    ),
    operations(
        "## A majority of the metadata nodes is gone",
        "systemctl stop",
        RESTORED,
    ),
    operations(
        "## The metadata of all nodes are gone",
        "systemctl stop",
        RESTORED,
    ),
];

const BETWEEN_HOSTS: Way = Way::Excepted(
    "needs two hosts with libvirt and ssh: \
     `a_guest_is_migrated_by_libvirt_between_two_hosts_and_back` does this between two namespaces",
);
