//! Command blocks of a document.

/// A fenced block of commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Path of the document in the repository.
    pub document: &'static str,
    /// The heading above the block.
    pub heading: String,
    /// Number of its first line in the document.
    pub line: usize,
    /// The commands in order.
    pub commands: Vec<Command>,
}

/// A command, and its output in the document.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Command {
    /// The machine of the prompt; empty if the document names none.
    pub prompt: String,
    /// The command with its continuation lines joined, and without a comment at its end.
    pub text: String,
    /// Lines of output below it.
    pub output: Vec<String>,
}

/// Languages of fences that hold commands. Other fences hold files.
const LANGUAGES: [&str; 4] = ["console", "sh", "bash", "text"];

/// The command blocks of a document.
pub fn command_blocks(document: &'static str, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut heading = "";
    let mut open: Option<(&str, usize, Vec<&str>)> = None;
    for (index, line) in text.lines().enumerate() {
        let fence = line.trim_start().strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(language)) => open = Some((language, index + 2, Vec::new())),
            (None, None) if line.starts_with('#') => heading = line,
            (None, None) => {}
            (Some((language, first, lines)), Some(_)) => {
                if LANGUAGES.contains(language) || language.is_empty() {
                    blocks.push(Block {
                        document,
                        heading: heading.to_owned(),
                        line: *first,
                        commands: commands(lines),
                    });
                }
                open = None;
            }
            (Some((_, _, lines)), None) => lines.push(line.trim()),
        }
    }
    blocks
}

/// Parses the lines of a block. Without any prompt in the block each line is a command.
fn commands(lines: &[&str]) -> Vec<Command> {
    let has_prompts = lines.iter().any(|line| prompt(line).is_some());
    let mut found: Vec<Command> = Vec::new();
    let mut goes_on = false;
    for line in lines {
        let typed = match prompt(line) {
            _ if goes_on => None,
            None if !has_prompts => Some(("", *line)),
            typed => typed,
        };
        let continues = line.ends_with('\\');
        match (typed, found.last_mut()) {
            (Some((prompt, text)), _) => found.push(Command {
                prompt: prompt.to_owned(),
                text: without_comment(text.trim_end_matches('\\')).to_owned(),
                output: Vec::new(),
            }),
            (None, Some(last)) if goes_on => {
                last.text.push(' ');
                last.text
                    .push_str(without_comment(line.trim_end_matches('\\')));
            }
            (None, Some(last)) => last.output.push((*line).to_owned()),
            (None, None) => {}
        }
        goes_on = match typed {
            Some(_) => continues,
            None => goes_on && continues,
        };
    }
    found
}

/// Returns the machine's name and the command of a line like `one$ penstock health`.
fn prompt(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.split_once(['$', '#'])?;
    let is_name = name.chars().all(|c| c.is_ascii_lowercase());
    (is_name && rest.starts_with(' ')).then(|| (name, rest.trim()))
}

fn without_comment(text: &str) -> &str {
    let text = text.split_once(" # ").map_or(text, |(text, _)| text);
    text.trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(prompt: &str, text: &str, output: &[&str]) -> Command {
        Command {
            prompt: prompt.to_owned(),
            text: text.to_owned(),
            output: output.iter().map(|line| (*line).to_owned()).collect(),
        }
    }

    #[test]
    fn blocks_are_found_with_their_headings_commands_and_outputs() {
        let file = "# A\n```yaml\n$ no\n```\n";
        let typed = "   $ a \\\n       b    # why\n   one$   c $HOME\n   it costs 5$ a line\n";
        let plain = "```text\nx y\nz\n```\n";
        let text = format!("{file}## B\n1. in a list:\n   ```console\n{typed}   ```\n{plain}");
        let found = command_blocks("x.md", &text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].heading.as_str(), found[0].line), ("## B", 8));
        let output = ["it costs 5$ a line"];
        assert_eq!(
            found[0].commands,
            [command("", "a b", &[]), command("one", "c $HOME", &output)]
        );
        assert_eq!(
            found[1].commands,
            [command("", "x y", &[]), command("", "z", &[])]
        );
    }
}
