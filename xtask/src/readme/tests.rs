use super::plan::{PLAN, entry_of};
use super::*;
use crate::long::without_short_form;

fn blocks_of(document: &'static str) -> Vec<Block> {
    let text = std::fs::read_to_string(workspace().join(document)).unwrap();
    command_blocks(document, &text)
}

fn every_block() -> Vec<Block> {
    DOCUMENTS.into_iter().flat_map(blocks_of).collect()
}

#[test]
fn each_command_block_is_run_or_is_an_exception_with_a_reason() {
    for block in every_block() {
        let entry = entry_of(&block);
        let entry = entry.unwrap_or_else(|| {
            panic!(
                "{}:{}: the plan has no entry for this block, or several: {:?}",
                block.document, block.line, block.commands
            )
        });
        if let Way::Excepted(reason) = entry.way {
            assert!(reason.len() > 20, "{}: {reason}", block.line);
        }
    }
}

#[test]
fn a_new_block_is_noticed() {
    let text = "## First disk\n```console\n$ penstock frobnicate\n```\n";
    let blocks = command_blocks("README.md", text);
    assert_eq!(blocks.len(), 1);
    assert!(entry_of(&blocks[0]).is_none());
}

#[test]
fn each_entry_of_the_plan_matches_a_block() {
    let blocks = every_block();
    for entry in PLAN {
        let of = blocks.iter().filter(|block| entry.is_of(block)).count();
        assert_eq!(of, 1, "{entry:?}");
    }
}

#[test]
fn tests_that_type_blocks_exist_and_have_a_short_form() {
    for entry in PLAN {
        let Way::Test(package, test) = entry.way else {
            continue;
        };
        assert!(without_short_form().all(|long| long != test), "{test}");
        let folder = package.trim_end_matches("-tests");
        let folder = workspace().join("tests").join(folder).join("tests");
        let head = format!("fn {test}()");
        let typed = std::fs::read_dir(&folder).unwrap().any(|file| {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap_or_default();
            // The test takes the commands from the document.
            text.contains(&head) && text.contains("console_lines")
        });
        assert!(typed, "{head} in {}", folder.display());
    }
}

#[test]
fn scenes_have_the_machines_whose_prompts_the_blocks_show() {
    for block in every_block() {
        let Some(Way::Typed(scene)) = entry_of(&block).map(|entry| entry.way) else {
            continue;
        };
        for command in &block.commands {
            assert!(scene.knows(&command.prompt), "{scene:?}: {command:?}");
        }
    }
}
