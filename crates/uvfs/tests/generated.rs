//! Manual pages and completions, which the command makes from its own description, and the words of the command where
//! no mount is needed.

#[path = "generated/words.rs"]
mod words;

use std::fs;
use std::path::Path;
use std::process::Command;

use uvfs_testing::{Need, has};

fn uvfs(arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs"));
    let output = command.args(arguments).output().expect("uvfs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    output.stdout
}

/// The names of the subcommands, as the help lists them; the benchmarks are a command of their own.
fn subcommands() -> Vec<String> {
    let help = String::from_utf8(uvfs(&["--help"])).unwrap();
    let list = help.split("Commands:\n").nth(1).expect("a list");
    let lines = list.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .filter(|name| name != "bench")
        .collect()
}

/// Every command has a manual page that man(1) can read.
#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("share/man1");
    uvfs(&["man", man.to_str().unwrap()]);
    let names = subcommands();
    assert!(names.len() > 10, "{names:?}");
    for name in &names {
        let page = fs::read_to_string(man.join(format!("uvfs-{name}.1")));
        let page = page.unwrap_or_else(|error| panic!("uvfs-{name}.1: {error}"));
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION"] {
            assert!(page.contains(&format!(".SH {section}\n")), "{name}: {page}");
        }
    }
    let helper = dir.path().join("share/man8/mount.fuse.uvfs.8");
    let text = fs::read_to_string(&helper).expect("the page of mount(8)'s helper");
    assert!(
        text.contains("allow_other") && text.contains("fstab"),
        "{text}"
    );
    check_page(&helper);
    for page in fs::read_dir(&man).unwrap() {
        check_page(&page.unwrap().path());
    }
    if !has(&[Need::Program("man")]) {
        return;
    }
    let shown = Command::new("man")
        .args(["-l", man.join("uvfs-mount.1").to_str().unwrap()])
        .env("MANWIDTH", "100")
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    // Lines are justified by spaces.
    let shown = shown.split(' ').filter(|word| !word.is_empty());
    let shown = shown.collect::<Vec<_>>().join(" ");
    for words in [
        "uvfs mount /srv/data /mnt\n",
        "MOUNT OPTIONS",
        "[--transport auto|uring|dev]",
        "[-o OPTIONS]",
        "SOURCE MOUNTPOINT",
        "attr_timeout=TIME, entry_timeout=TIME",
        "EXIT STATUS",
        "--foreground",
    ] {
        assert!(shown.contains(words), "no {words:?}: {shown}");
    }
}

/// groff finds nothing wrong in a page, and mandb(8) finds its name.
fn check_page(page: &Path) {
    if has(&[Need::Program("groff")]) {
        let mut command = Command::new("groff");
        command.args(["-man", "-Tutf8", "-ww", "-z"]).arg(page);
        let output = command.output().unwrap();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{page:?}: {output:?}"
        );
    }
    if has(&[Need::Program("lexgrog")]) {
        let output = Command::new("lexgrog").arg(page).output().unwrap();
        let name = page.file_stem().unwrap().to_str().unwrap();
        let found = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && found.contains(&format!("\"{name} - ")),
            "{found}"
        );
    }
}

/// Shells accept their completions.
#[test]
fn shells_take_their_completions() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = uvfs(&["completions", shell]);
        let text = String::from_utf8_lossy(&script).into_owned();
        for name in subcommands() {
            assert!(text.contains(&name), "{shell}: no {name}");
        }
        let path = dir.path().join(shell);
        fs::write(&path, &script).unwrap();
        if has(&[Need::Program(shell)]) {
            let output = Command::new(shell).arg("-n").arg(&path).output().unwrap();
            assert!(
                output.status.success() && output.stderr.is_empty(),
                "{shell}: {output:?}"
            );
        }
    }
    // Values of options are completed, and files where an image is meant.
    let fish = String::from_utf8(uvfs(&["completions", "fish"])).unwrap();
    let transport = fish.lines().find(|line| line.contains("-l transport"));
    assert!(
        transport.is_some_and(|line| line.contains("uring")),
        "{fish}"
    );
    let zsh = String::from_utf8(uvfs(&["completions", "zsh"])).unwrap();
    assert!(zsh.contains("The directory to serve:_files -/"), "{zsh}");
    let completes = "source \"$0\"; COMP_WORDS=(uvfs mo); COMP_CWORD=1; _uvfs uvfs mo uvfs; echo \"${COMPREPLY[@]}\"";
    if has(&[Need::Program("bash")]) {
        let mut bash = Command::new("bash");
        bash.args(["-c", completes]).arg(dir.path().join("bash"));
        let output = bash.output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "mount\n",
            "{output:?}"
        );
    }
    let mut wrong = Command::new(env!("CARGO_BIN_EXE_uvfs"));
    let wrong = wrong.args(["completions", "cmd.exe"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
}
