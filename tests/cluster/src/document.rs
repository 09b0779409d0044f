//! The commands that a document tells people to type.

/// A line of a console block: whose prompt it follows, and the command.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// What stands before the `$`: a machine's name, or nothing.
    pub prompt: String,
    /// What stands after it, with the lines that go on.
    pub command: String,
}

/// The lines of all console blocks between a heading and the next one.
pub fn console_lines(text: &str, heading: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let (mut inside, mut block, mut more) = (false, false, false);
    for line in text.lines() {
        if !block && line.starts_with('#') {
            inside = line == heading;
        } else if line.starts_with("```") {
            block = !block && line == "```console";
        } else if inside && block {
            let (text, goes_on) = match line.strip_suffix('\\') {
                Some(text) => (text, true),
                None => (line, false),
            };
            if more {
                let last: &mut Line = lines.last_mut().expect("a line goes on");
                last.command.push_str(text.trim_start());
            } else if let Some((prompt, command)) = text.split_once('$') {
                lines.push(Line {
                    prompt: prompt.trim().to_owned(),
                    command: command.trim_start().to_owned(),
                });
            }
            more = goes_on;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_below_a_heading_are_found() {
        let line = |prompt: &str, command: &str| Line {
            prompt: prompt.to_owned(),
            command: command.to_owned(),
        };
        let other = "```console\n$ no\n```\n";
        let block = "```console\n$ a \\\n    b # c\none$ d\nd's output\n```\n";
        let text = format!("# A\n{other}# B\n```text\n$ no\n```\n{block}## C\n{other}");
        assert_eq!(
            console_lines(&text, "# B"),
            [line("", "a b # c"), line("one", "d")]
        );
    }
}
