//! Whether AppArmor lets a domain's QEMU connect to a socket.
//!
//! libvirt makes a profile for each domain (virt-aa-helper) that names its disks' files. It leaves the
//! sockets of vhostuser disks out, up to at least version 11. So a rule of the host's own has to allow them.

use std::path::{Path, PathBuf};

use crate::domain::SOCKET_DIRECTORY;
use crate::xml::Element;

/// Where a host's own rules for all domains belong. libvirt's package includes it and leaves it alone.
pub const LOCAL_RULES: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
/// Longest profile that is read, in bytes; libvirt's has a tenth of it.
const PROFILE_BYTES_MAX: u64 = 1 << 20;
/// Patterns that one with braces may stand for; one of more matches nothing.
const ALTERNATIVES_MAX: usize = 64;

/// The command that adds the rule. Debian 13's libvirt leaves the directory out while nothing is in it. A
/// domain that runs keeps the rules that it was started with.
pub fn allow_command(socket: &str) -> String {
    let directory = Path::new(LOCAL_RULES).parent().unwrap_or(Path::new("/"));
    format!(
        "mkdir -p {} && echo '{}' >> {LOCAL_RULES}",
        directory.display(),
        rule(socket)
    )
}

/// The rule to put into [`LOCAL_RULES`] for the sockets of [`SOCKET_DIRECTORY`] and for `socket`.
pub fn rule(socket: &str) -> String {
    let directory = format!("{SOCKET_DIRECTORY}/");
    match socket.strip_prefix(&directory) {
        Some(name) if !name.contains('/') => format!("{directory}*.sock rw,"),
        _ => format!("\"{socket}\" rw,"),
    }
}

/// Whether libvirt confines its domains with AppArmor, by `virsh capabilities`.
pub fn is_in_force(capabilities: &Element) -> bool {
    let host = capabilities.find(&["host"]);
    let models = host.iter().flat_map(|host| host.children("secmodel"));
    let mut names = models.filter_map(|model| model.find(&["model"]));
    names.any(|name| name.text == "apparmor")
}

/// Whether the rules for a domain let QEMU connect to a socket. `root` is where `/etc/apparmor.d` begins.
pub fn allows(root: &Path, uuid: &str, socket: &str) -> bool {
    let directory = root.join("etc/apparmor.d");
    let mut files = vec![
        directory.join("abstractions/libvirt-qemu"),
        directory.join("local/abstractions/libvirt-qemu"),
        directory.join(format!("libvirt/libvirt-{uuid}")),
        directory.join(format!("libvirt/libvirt-{uuid}.files")),
    ];
    // Newer packages include this directory.
    if let Ok(listed) = std::fs::read_dir(directory.join("abstractions/libvirt-qemu.d")) {
        files.extend(listed.flatten().map(|file| file.path()));
    }
    files.iter().any(|file| allows_in(&read(file), socket))
}

fn read(path: &PathBuf) -> String {
    let small = std::fs::metadata(path).is_ok_and(|found| found.len() <= PROFILE_BYTES_MAX);
    match small {
        true => std::fs::read_to_string(path).unwrap_or_default(),
        false => String::new(),
    }
}

/// Whether one of a profile's rules allows reading and writing a path, and none denies it.
fn allows_in(profile: &str, path: &str) -> bool {
    let mut is_allowed = false;
    for line in profile.lines() {
        let line = line.trim();
        let (line, is_denied) = match line.strip_prefix("deny ") {
            Some(rest) => (rest.trim_start(), true),
            None => (line.strip_prefix("owner ").unwrap_or(line), false),
        };
        let Some((pattern, rights)) = rule_of(line) else {
            continue;
        };
        let rights = rights.trim().trim_end_matches(',');
        let is_both = rights.contains('r') && rights.contains('w');
        if !matches(pattern, path) || !rights.chars().all(|c| c.is_ascii_alphabetic()) {
            continue;
        }
        if is_denied && rights.contains('w') {
            return false;
        }
        is_allowed |= is_both && !is_denied;
    }
    is_allowed
}

/// The pattern and the rights of a file rule.
fn rule_of(line: &str) -> Option<(&str, &str)> {
    match line.strip_prefix('"') {
        Some(rest) => rest.split_once('"'),
        None if line.starts_with('/') || line.starts_with("@{") => {
            line.split_once(char::is_whitespace)
        }
        None => None,
    }
}

/// Whether a path is what a pattern means: `*` stands for anything without a slash, `**` for anything, `?`
/// for one character, `{a,b}` for each of these, `@{run}` for `/run`.
fn matches(pattern: &str, path: &str) -> bool {
    let pattern = pattern.replace("@{run}", "/run");
    let mut patterns = vec![pattern];
    // Braces are written out one after the other.
    while let Some(index) = patterns.iter().position(|one| one.contains('{')) {
        let one = patterns.swap_remove(index);
        let Some(written) = write_out(&one) else {
            return false;
        };
        patterns.extend(written);
        if patterns.len() > ALTERNATIVES_MAX {
            return false;
        }
    }
    patterns
        .iter()
        .any(|pattern| is_match(pattern.as_bytes(), path.as_bytes()))
}

/// The patterns of one whose first innermost braces are written out.
fn write_out(pattern: &str) -> Option<Vec<String>> {
    let end = pattern.find('}')?;
    let begin = pattern[..end].rfind('{')?;
    let (head, tail) = (&pattern[..begin], &pattern[end + 1..]);
    let choices = pattern[begin + 1..end].split(',');
    Some(choices.map(|one| format!("{head}{one}{tail}")).collect())
}

fn is_match(pattern: &[u8], path: &[u8]) -> bool {
    match (pattern, path) {
        ([], _) => path.is_empty(),
        ([b'*', b'*', rest @ ..], _) => (0..=path.len()).any(|at| is_match(rest, &path[at..])),
        ([b'*', rest @ ..], _) => {
            let name = path.iter().take_while(|byte| **byte != b'/').count();
            (0..=name).any(|at| is_match(rest, &path[at..]))
        }
        ([b'?', rest @ ..], [first, left @ ..]) => *first != b'/' && is_match(rest, left),
        ([one, rest @ ..], [first, left @ ..]) => one == first && is_match(rest, left),
        (_, []) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_apparmor_says() {
        let socket = "/run/penstock/web.sock";
        for pattern in [
            "/run/penstock/*.sock",
            "/run/**",
            "/{,var/}run/penstock/web.sock",
            "@{run}/penstock/we?.sock",
            "/{run,srv}/{a,pen{stock,y}}/*",
        ] {
            assert!(matches(pattern, socket), "{pattern}");
        }
        for pattern in [
            "/run/*",
            "/run/penstock/*.soc",
            "/run/penstock/?.sock",
            "/run/penstock/{a,b}.sock",
            "/run/penstock/{web.sock",
            "",
        ] {
            assert!(!matches(pattern, socket), "{pattern}");
        }
        let many = "/".to_owned() + &"{a,b}".repeat(20);
        assert!(!matches(&many, "/aaaaaaaaaaaaaaaaaaaa"), "bounded");
    }

    #[test]
    fn a_socket_is_allowed_by_a_rule_of_the_host() {
        let socket = "/run/penstock/web.sock";
        let allowed = [
            "  /run/penstock/*.sock rw,",
            "\"/run/penstock/web.sock\" rw,",
            "owner /run/** rwk,",
        ];
        for profile in allowed {
            assert!(allows_in(profile, socket), "{profile}");
        }
        let refused = [
            "",
            "# /run/penstock/*.sock rw,",
            "/run/penstock/*.sock r,",
            "/run/** rw,\ndeny /run/penstock/* w,",
            "capability net_admin,",
        ];
        for profile in refused {
            assert!(!allows_in(profile, socket), "{profile}");
        }
        assert!(allows_in(&rule(socket), socket));
        assert!(allows_in(&rule("/srv/a b.sock"), "/srv/a b.sock"));

        let root = tempfile::tempdir().unwrap();
        assert!(!allows(root.path(), "u", socket));
        let local = root.path().join(&LOCAL_RULES[1..]);
        std::fs::create_dir_all(local.parent().unwrap()).unwrap();
        std::fs::write(&local, rule(socket)).unwrap();
        assert!(allows(root.path(), "u", socket));
    }

    #[test]
    fn capabilities_tell_whether_apparmor_confines() {
        let with = |model: &str| {
            let text = format!(
                "<capabilities><host><secmodel><model>{model}</model></secmodel></host></capabilities>"
            );
            is_in_force(&Element::parse(&text).unwrap())
        };
        assert!(with("apparmor"));
        assert!(!with("none"));
    }
}
