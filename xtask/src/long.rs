//! `test --long`: the long forms of the tests that have one. `cargo xtask test` runs the short ones.

use std::ffi::OsString;

use anyhow::{Result, bail};
use guest_rig::form::LONG_ENV;
use guest_rig::paths::PENSTOCK_BIN_ENV;

use crate::build::{binary, build, cargo, check, has_subcommand};
use crate::checks::TEST_TARGETS;

/// A test with two forms, or with a long one only.
struct TwoForms {
    package: &'static str,
    /// As cargo-nextest names it.
    test: &'static str,
    short: &'static str,
    long: &'static str,
}

/// Of a test that `cargo xtask test` does not run: `.config/nextest.toml` leaves it out.
const NONE: &str = "none";

const TESTS: [TwoForms; 41] = [
    TwoForms {
        package: "appliance-tests",
        test: "a_machine_becomes_a_node_and_is_updated",
        short: "UEFI: an update that is kept",
        long: "UEFI and BIOS, also one whose slot is damaged, and one with which the machine is not well",
    },
    TwoForms {
        package: "appliance-tests",
        test: "three_machines_told_in_three_ways_are_one_cluster",
        short: NONE,
        long: "a credential, a NoCloud disk, the wizard; a second machine of a name; power of one lost",
    },
    TwoForms {
        package: "appliance-tests",
        test: "a_machine_says_what_it_cannot_do",
        short: NONE,
        long: "6 mistakes, one mended by the wizard",
    },
    TwoForms {
        package: "appliance-tests",
        test: "a_first_boot_goes_on_after_a_loss_of_power",
        short: NONE,
        long: "power lost at each step, and at 8 moments of the start",
    },
    TwoForms {
        package: "appliance-tests",
        test: "an_update_that_loses_power_leaves_one_of_two_versions",
        short: NONE,
        long: "power lost at 8 moments",
    },
    TwoForms {
        package: "appliance-tests",
        test: "a_full_state_partition_is_named_and_costs_nothing",
        short: NONE,
        long: "full while it runs, and at a start",
    },
    TwoForms {
        package: "sim",
        test: "without_faults_every_request_ends_well",
        short: "80 seeds",
        long: "1,600 seeds",
    },
    TwoForms {
        package: "sim",
        test: "with_faults_no_guest_sees_what_it_may_not",
        short: "150 seeds",
        long: "3,000 seeds",
    },
    TwoForms {
        package: "sim",
        test: "with_faults_and_partial_writes_no_guest_sees_what_it_may_not",
        short: "100 seeds",
        long: "2,000 seeds",
    },
    TwoForms {
        package: "sim",
        test: "with_the_power_of_all_nodes_lost_no_guest_sees_what_it_may_not",
        short: "100 seeds",
        long: "2,000 seeds",
    },
    TwoForms {
        package: "sim",
        test: "with_two_devices_on_each_node_no_guest_sees_what_it_may_not",
        short: "60 seeds",
        long: "1,200 seeds",
    },
    TwoForms {
        package: "sim",
        test: "each_mistake_is_noticed_by_some_seed",
        short: "21 mistakes, which show soon",
        long: "29 mistakes",
    },
    TwoForms {
        package: "block-tests",
        test: "a_block_device_outlives_daemon_and_helper",
        short: "3 kills of each",
        long: "30 kills of each",
    },
    TwoForms {
        package: "block-tests",
        test: "without_vduse_a_block_device_is_made_by_nbd",
        short: NONE,
        long: "30 kills",
    },
    TwoForms {
        package: "nfs-tests",
        test: "a_client_sees_pauses_and_no_errors_whatever_happens_to_nfs_nodes",
        short: "1 move, 1 kill and 1 cut-off over TCP, 1 power cut over RDMA",
        long: "5 moves, 5 kills and 5 cut-offs over each, 1 power cut",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "two_guests_on_two_nodes_see_one_tree",
        short: "100 records of each guest, 1 node killed",
        long: "5,000 records of each guest, a node killed 6 times",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "fsx_reads_what_it_wrote",
        short: "20 s",
        long: "an hour",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "pjdfstest_passes_but_for_what_is_listed",
        short: "rename, unlink, and on a read-only tree",
        long: "all of it",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "two_guests_that_change_a_tree_at_random_agree_on_it",
        short: "25 s",
        long: "an hour in 6 rounds",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_name_that_always_exists_always_opens_while_it_is_replaced",
        short: "15 s",
        long: "10 minutes",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_directory_has_as_many_names_as_it_may",
        short: "3,000 names",
        long: "20,000 names by a guest, 1,000,000 by a front end",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_tree_has_as_many_levels_and_links_as_it_may",
        short: "300 levels",
        long: "4,000 levels, 65,000 links of a file",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_full_pool_says_so_and_takes_removals",
        short: NONE,
        long: "a pool that is filled, and room again",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_host_that_is_cut_off_has_nothing_stale_when_it_is_back",
        short: NONE,
        long: "a host that is cut off for longer than its session",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "linux_6_12_uses_a_tree_and_maps_what_it_appends_to",
        short: "names, attributes and a mapping",
        long: "also fio's verification",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "linux_uses_a_tree_whose_replies_come_in_another_order_on_two_queues",
        short: NONE,
        long: "two queues, replies out of order",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_tree_is_the_upper_directory_of_an_overlay",
        short: NONE,
        long: "overlay filesystems of Linux 6.1",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "a_tree_is_the_upper_directory_of_an_overlay_with_linux_6_12",
        short: NONE,
        long: "overlay filesystems of Linux 6.12",
    },
    TwoForms {
        package: "filesystem-tests",
        test: "what_was_flushed_outlives_the_power_of_all_nodes",
        short: "power lost twice",
        long: "power lost 10 times",
    },
    TwoForms {
        package: "guest-tests",
        test: "guest_verifies_every_byte_while_the_daemon_is_killed",
        short: "8 kills",
        long: "100 kills",
    },
    TwoForms {
        package: "cluster-tests",
        test: "guest_under_load_migrates_there_and_back",
        short: "2 migrations",
        long: "10 migrations, and the table of their pauses",
    },
    TwoForms {
        package: "cluster-tests",
        test: "rolling_restart_goes_unnoticed_by_the_guest",
        short: NONE,
        long: "each node restarted, and two of them killed",
    },
    TwoForms {
        package: "guest-tests",
        test: "many_disks_on_one_guest_keep_their_own_data",
        short: "8 disks, all plugged again once",
        long: "28 disks, all plugged again three times",
    },
    TwoForms {
        package: "guest-tests",
        test: "unplug_under_load_leaves_the_neighbour_alone",
        short: "2 unplugs",
        long: "10 unplugs",
    },
    TwoForms {
        package: "package-tests",
        test: "package_serves_guests_and_leaves_their_data",
        short: "Debian 12: installed, killed, removed, purged",
        long: "Debian 12 and 13: also upgraded under load, hung, rebooted",
    },
    TwoForms {
        package: "package-tests",
        test: "eight_commands_lead_from_the_package_to_a_confined_guest",
        short: NONE,
        long: "Debian 12 and 13: until the guest's kernel has mounted it",
    },
    TwoForms {
        package: "rdma-tests",
        test: "rdma_cluster_survives_link_and_node_loss_and_copies_nothing",
        short: "1 node killed, 50 front ends, 3 attachments",
        long: "2 nodes killed, 1,000 front ends, 20 attachments",
    },
    TwoForms {
        package: "rdma-tests",
        test: "host_uses_remote_storage_over_rdma_and_goes_on_without_it",
        short: NONE,
        long: "RDMA and the link lost, a node and the host killed, processor time by RDMA and TCP",
    },
    TwoForms {
        package: "libvirt-tests",
        test: "a_guest_uses_a_disk_from_attach_to_detach",
        short: "the libvirt that is installed",
        long: "also Debian 13's, in a root of its own",
    },
    TwoForms {
        package: "libvirt-tests",
        test: "a_domain_with_the_hook_gets_its_disks_and_gives_them_back",
        short: "the libvirt that is installed",
        long: "also Debian 13's, in a root of its own",
    },
    TwoForms {
        package: "libvirt-tests",
        test: "a_guest_is_migrated_by_libvirt_between_two_hosts_and_back",
        short: "2 migrations by the libvirt that is installed",
        long: "10 migrations, also by Debian 13's, in a root of its own",
    },
];

/// Names of the tests that have a long form only.
pub fn without_short_form() -> impl Iterator<Item = &'static str> {
    let tests = TESTS.iter().filter(|test| test.short == NONE);
    tests.map(|test| test.test)
}

/// Runs the long forms; `args` go to cargo-nextest.
pub fn test(args: &[OsString]) -> Result<()> {
    if !has_subcommand("nextest") {
        bail!("`test --long` needs cargo-nextest: `cargo install --locked cargo-nextest`");
    }
    if args.iter().any(|arg| arg == "-E") {
        // cargo-nextest would run what either of two expressions selects.
        bail!("`test --long` takes names of tests, no -E");
    }
    let selected = TESTS
        .iter()
        .map(|test| format!("(package({}) & test(={}))", test.package, test.test))
        .collect::<Vec<_>>()
        .join(" | ");
    build()?;
    let mut command = cargo()?;
    command.args(["nextest", "run", "--workspace", "--profile", "long", "-E"]);
    command.arg(selected).args(TEST_TARGETS).args(args);
    command.env(PENSTOCK_BIN_ENV, binary("penstock")?);
    let result = check(command.env(LONG_ENV, "1"));
    println!("Long forms, of those that were selected:");
    for test in &TESTS {
        println!(
            "{} {}: {} (in `cargo xtask test`: {})",
            test.package, test.test, test.long, test.short
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::workspace;

    #[test]
    fn nextest_leaves_out_what_has_no_short_form() {
        let config = std::fs::read_to_string(workspace().join(".config/nextest.toml")).unwrap();
        for test in without_short_form() {
            assert!(config.contains(&format!("test(={test})")), "{test}");
        }
        let left_out = config.matches("test(=").count();
        assert_eq!(left_out, without_short_form().count(), "that nothing runs");
    }

    /// cargo-nextest says nothing about an expression of which a part selects no test.
    #[test]
    fn each_named_test_exists() {
        for test in &TESTS {
            let folder = test.package.trim_end_matches("-tests");
            let folder = workspace().join("tests").join(folder).join("tests");
            let files = std::fs::read_dir(&folder).unwrap();
            let files = files.filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
            let holding: Vec<String> = files.filter(|text| is_run(text, test.test)).collect();
            let [text] = &holding[..] else {
                panic!(
                    "{} tests {} in {}",
                    holding.len(),
                    test.test,
                    folder.display()
                );
            };
            // A test with both forms reads which one to run.
            assert!(
                test.short == NONE || text.contains("Form::of_this_run()"),
                "{}",
                test.test
            );
        }
    }

    /// Returns whether a file holds a function of this name that the test runner runs.
    fn is_run(text: &str, name: &str) -> bool {
        let lines: Vec<&str> = text.lines().collect();
        let head = format!("fn {name}()");
        let Some(at) = lines.iter().position(|line| line.starts_with(&head)) else {
            return false;
        };
        let attributes = lines[..at]
            .iter()
            .rev()
            .take_while(|line| line.starts_with("#["));
        let attributes: Vec<_> = attributes.collect();
        attributes.contains(&&"#[test]") && !attributes.iter().any(|one| one.contains("ignore"))
    }

    #[test]
    fn a_test_that_is_ignored_or_commented_out_does_not_exist() {
        assert!(is_run("#[test]\nfn a() -> Result<()> {", "a"));
        assert!(!is_run("#[test]\n#[ignore]\nfn a() {", "a"));
        assert!(!is_run("#[test]\n// fn a() {", "a"));
        assert!(!is_run("#[cfg(any())]\nfn a() {", "a"));
    }
}
