//! The rescue menu.

use std::process::Command;

use anyhow::Result;

use super::{CLEAR, Console, key, print};
use crate::process::run;
use crate::update::Places;

const MENU: &str = "Rescue\n\n  \
    1  restart the daemon; guests see a pause\n  \
    2  start the other slot at the next boot, once\n  \
    3  try again what the first boot could not do\n  \
    4  restart this machine\n  \
    5  switch this machine off\n\n  \
    b  back\n";

pub(super) fn menu(console: &Console<'_>) -> Result<()> {
    print(&format!("{CLEAR}{MENU}"))?;
    loop {
        let systemctl = |args: &[&str]| run(Command::new("systemctl").args(args));
        let outcome = match key()? {
            Some('1') => systemctl(&["restart", "--no-block", "penstock.service"]),
            Some('2') => crate::update::try_other_slot(&Places::default())
                .map(|slot| format!("slot {slot} is started at the next boot")),
            Some('3') => systemctl(&["restart", "--no-block", "penstock-first-boot.service"])
                .and_then(|_| systemctl(&["start", "--no-block", "penstock.service"])),
            Some('4') => systemctl(&["reboot"]),
            Some('5') => systemctl(&["poweroff"]),
            Some('b' | 'B') => return Ok(()),
            _ => continue,
        };
        match outcome {
            Ok(text) if text.trim().is_empty() => return Ok(()),
            Ok(text) => return console.show_text("Rescue", &text),
            Err(error) => return console.show_text("Rescue", &format!("{error:#}")),
        }
    }
}
