//! The machine's own screen and keyboard: what somebody sees and types who stands before it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use guest_rig::process::wait_until;
use serde_json::json;

use crate::Machine;

/// Between two keys: an emulated keyboard loses those that come too fast.
const KEY_INTERVAL: Duration = Duration::from_millis(60);

impl Machine {
    /// The text on the screen.
    pub fn screen(&mut self) -> Result<String> {
        self.sh("fold -w $(stty size < /dev/tty1 | cut -d' ' -f2) /dev/vcs1 | sed 's/ *$//'")
    }

    /// Waits until the screen shows `text`, and returns all that it shows.
    pub fn screen_shows(&mut self, text: &str, limit: Duration) -> Result<String> {
        let mut last = String::new();
        wait_until(limit, || {
            last = self.screen()?;
            Ok(last.contains(text).then(|| last.clone()))
        })
        .with_context(|| format!("the screen never showed '{text}':\n{last}"))
    }

    /// Types `text`; a line feed is the Enter key.
    pub fn types(&mut self, text: &str) -> Result<()> {
        for character in text.chars() {
            let keys: Vec<_> = keys(character)
                .with_context(|| format!("the rig has no key for {character:?}"))?
                .into_iter()
                .map(|key| json!({"type": "qcode", "data": key}))
                .collect();
            let arguments = json!({"keys": keys, "hold-time": 20});
            self.running()?.qmp().execute("send-key", arguments)?;
            std::thread::sleep(KEY_INTERVAL);
        }
        Ok(())
    }

    /// Waits until the screen asks `question`, and answers.
    pub fn answers(&mut self, question: &str, answer: &str) -> Result<()> {
        self.screen_shows(question, Duration::from_secs(120))?;
        self.types(&format!("{answer}\n"))
    }

    /// Writes a picture of the screen (PPM).
    pub fn photograph(&mut self, file: &Path) -> Result<()> {
        let arguments = json!({"filename": file});
        self.running()?.qmp().execute("screendump", arguments)?;
        Ok(())
    }
}

/// The keys of an American keyboard for a character, by QEMU's names.
fn keys(character: char) -> Option<Vec<String>> {
    const PLAIN: [(char, &str); 10] = [
        ('\n', "ret"),
        (' ', "spc"),
        ('-', "minus"),
        ('.', "dot"),
        ('/', "slash"),
        (',', "comma"),
        (';', "semicolon"),
        ('=', "equal"),
        ('[', "bracket_left"),
        (']', "bracket_right"),
    ];
    const SHIFTED: [(char, &str); 4] = [
        ('+', "equal"),
        (':', "semicolon"),
        ('_', "minus"),
        ('@', "2"),
    ];
    let of = |table: &[(char, &str)]| {
        let found = table.iter().find(|(one, _)| *one == character);
        found.map(|(_, key)| (*key).to_owned())
    };
    if character.is_ascii_lowercase() || character.is_ascii_digit() {
        return Some(vec![character.to_string()]);
    }
    if character.is_ascii_uppercase() {
        let key = character.to_ascii_lowercase().to_string();
        return Some(vec!["shift".to_owned(), key]);
    }
    if let Some(key) = of(&PLAIN) {
        return Some(vec![key]);
    }
    of(&SHIFTED).map(|key| vec!["shift".to_owned(), key])
}

#[cfg(test)]
mod tests {
    use super::keys;

    #[test]
    fn tokens_and_addresses_can_be_typed() {
        let text = "pst1.aB_-9/24:+=\n";
        assert!(text.chars().all(|character| keys(character).is_some()));
        assert_eq!(keys('A'), Some(vec!["shift".to_owned(), "a".to_owned()]));
        assert_eq!(keys('é'), None);
    }
}
