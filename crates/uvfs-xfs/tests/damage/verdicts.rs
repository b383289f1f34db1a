//! Every damage, judged by the checker and by xfs_repair.

use super::*;

/// Where the two differ on purpose.
struct Explained {
    /// Part of the damage's name.
    damage: &'static str,
    /// The findings that xfs_repair does not have: how one begins, and part of the rest. Each of
    /// our findings is one of these.
    ours: &'static [(&'static str, &'static str)],
    /// Why.
    why: &'static str,
}

const EXPLAINED: &[Explained] = &[
    Explained {
        damage: "",
        ours: &[
            // Only blocks of B-trees have these two.
            ("", ": bb_leftsib: expected"),
            ("", ": bb_rightsib: expected"),
            ("directory index", ": forw of block"),
            ("directory index", ": back: expected"),
            ("attributes AG", ": forw of block"),
            ("attributes AG", ": back: expected"),
            ("attributes inode", ": forw of block"),
        ],
        why: "xfs_repair walks by parents only and never looks at neighbours",
    },
    Explained {
        damage: "",
        ours: &[
            ("AGFL AG", ": magic number: expected"),
            ("AGFL AG", ": uuid: expected"),
            ("AGFL AG", ": checksum"),
            ("AGFL AG", ": agfl_seqno: expected"),
            ("AGFL AG", ": log sequence number: expected"),
        ],
        why: "xfs_repair only says what is wrong with an AGFL's head or checksum, and goes on",
    },
    Explained {
        damage: "",
        ours: &[("attributes AG", ": freemap[")],
        why: "xfs_repair ignores an attribute leaf's free map; the kernel trusts it",
    },
    Explained {
        damage: "",
        ours: &[
            ("rmapbt AG", ": owners of the"),
            ("rmapbt AG", ": key "),
            ("rmapbt AG", ": high key "),
        ],
        why: "xfs_repair asks of each owner seen whether a record covers it, and so takes records \
              that cover too much or have more owners, and keys that do not lead to them; here \
              both must be equal",
    },
    Explained {
        damage: "",
        ours: &[
            ("attributes AG", ": uuid: expected"),
            ("attributes AG", ": owner: expected"),
            ("attributes AG", ": own block number: expected"),
            ("attributes AG", ": log sequence number: expected"),
            ("attributes AG", ": checksum"),
            ("attributes AG", ": firstused: expected"),
            // The next block's neighbour is then unknown.
            ("attributes AG", ": back: expected"),
            ("attributes AG", ": forw of block"),
        ],
        why: "xfs_repair does not check whose an attribute block is, and only says that the head or \
              the checksum of a leaf below the root is wrong, and goes on",
    },
    Explained {
        damage: "features_log_incompat",
        ours: &[("superblock", ": sb_features_log_incompat: expected")],
        why: "a kernel that does not know the feature refuses to mount; xfs_repair goes on",
    },
    Explained {
        damage: "sb 1",
        ours: &[
            ("superblock copy AG", ": sb_uuid: expected"),
            ("superblock copy AG", ": sb_dirblklog: expected"),
        ],
        why: "xfs_repair does not compare these fields of the copies",
    },
    Explained {
        damage: "",
        ours: &[
            ("attribute value AG", ": bytes: expected"),
            ("attribute value AG", ": offset: expected"),
        ],
        why: "a value's block that holds more or less than its part of the value: xfs_repair reads what it needs, \
              the kernel refuses it",
    },
    Explained {
        damage: "logsunit",
        ours: &[("superblock copy AG", ": sb_logsunit: expected")],
        why: "xfs_repair does not compare the log's stripe unit with the copies'",
    },
    Explained {
        damage: "core.forkoff",
        ours: &[
            ("", ": di_nextents: expected what fits"),
            ("", ": di_forkoff"),
        ],
        why: "an extent that lies in what should be the attribute fork; xfs_repair reads it \
              nevertheless",
    },
];

#[derive(Default)]
pub struct Tally {
    pub done: usize,
    pub corrupt: usize,
    pub dirty: usize,
    pub explained: Vec<String>,
    pub wrong: Vec<String>,
}

fn compare_one(
    dir: &Path,
    base: &Path,
    mem: &MemImage,
    regions: &[mutate::Region],
    d: &Damage,
    tally: &Mutex<Tally>,
) {
    let path = dir.join("damaged");
    let _ = fs::remove_file(&path);
    run(
        "cp",
        &[
            OsStr::new("--sparse=auto"),
            base.as_os_str(),
            path.as_os_str(),
        ],
    );
    let Some(name) = d.apply(&path, mem, regions) else {
        return;
    };
    judge(&path, name, How::Whole, tally);
}

/// Whether a line of xfs_repair about an image with a dirty log is about more than that log.
fn is_complaint(line: &str) -> bool {
    let of_the_log = [
        "ALERT: The filesystem has valuable metadata",
        "ignored because the -n option was used",
        "replay the log",
        // Mounting counts these again, so while the log is dirty they say nothing.
        "sb_icount ",
        "sb_ifree ",
        "sb_fdblocks ",
    ];
    !line.trim().is_empty() && !is_noise(line) && !of_the_log.iter().any(|l| line.contains(l))
}

/// The state of an image.
#[derive(Clone, Copy, PartialEq)]
pub enum How {
    /// Not in use when it was damaged.
    Whole,
    /// Cut off while in use: what counts is whether the log is dirty, and what else is found.
    Cut,
    /// Copied while in use, so no state that it ever had: whether the log is dirty.
    Torn,
}

/// Compares the verdicts on an image.
pub fn judge(path: &Path, name: String, how: How, tally: &Mutex<Tally>) {
    let ours = std::panic::catch_unwind(|| check_file(path, &CheckOptions::default()));
    let (findings, log): (Vec<String>, _) = match ours {
        Ok(Ok(o)) => (
            o.findings.iter().map(|f| f.to_string()).collect(),
            Some(o.log),
        ),
        Ok(Err(e)) => (vec![e.to_string()], None),
        Err(_) => {
            let mut t = tally.lock().unwrap();
            t.wrong.push(format!("PANIC: {name}"));
            return;
        }
    };
    let found = !findings.is_empty();
    let args = [OsStr::new("-n"), OsStr::new("-f"), path.as_os_str()];
    let out = output(
        "timeout",
        &[&[OsStr::new("60"), OsStr::new("xfs_repair")][..], &args].concat(),
    )
    .unwrap();
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    let theirs = match how {
        How::Whole => out.status.code() != Some(0),
        // It calls any dirty log damage: what else does it complain of?
        _ => text.lines().any(is_complaint),
    };
    let mut t = tally.lock().unwrap();
    t.done += 1;
    t.corrupt += usize::from(found);
    if how != How::Whole {
        let ours_dirty = log.as_ref().is_some_and(|log| !log.is_clean());
        let theirs_dirty = text.contains("valuable metadata changes in a log");
        t.dirty += usize::from(ours_dirty);
        if ours_dirty != theirs_dirty {
            t.wrong.push(format!(
                "{name}: log: ours {log:?}, xfs_repair {}",
                if theirs_dirty { "dirty" } else { "clean" }
            ));
        }
    }
    if found == theirs || how == How::Torn {
        return;
    }
    let is = |f: &str, (begin, part): &(&str, &str)| f.starts_with(begin) && f.contains(part);
    let explained = EXPLAINED.iter().find(|e| {
        found && name.contains(e.damage) && findings.iter().all(|f| e.ours.iter().any(|o| is(f, o)))
    });
    if let Some(e) = explained {
        let first = findings.first().map_or("nothing", |f| f);
        t.explained.push(format!("{name}: {first}: {}", e.why));
        return;
    }
    let theirs_said = text
        .lines()
        .filter(|l| !is_noise(l))
        .take(4)
        .map(|l| format!("\n    xfs_repair: {l}"));
    let ours_said = findings.iter().take(4).map(|f| format!("\n    ours: {f}"));
    t.wrong.push(format!(
        "{name}: ours {}, xfs_repair {}{}",
        if found { "corrupt" } else { "clean" },
        if theirs { "corrupt" } else { "clean" },
        ours_said.chain(theirs_said).collect::<String>(),
    ));
}

fn compare_all(image: &Image, damages: &[Damage]) {
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    assert!(regions.len() > 100);
    let tally = Mutex::new(Tally::default());
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for k in 0..3 {
            let dir: PathBuf = image.dir().join(format!("worker-{k}"));
            fs::create_dir_all(&dir).unwrap();
            let (tally, next, mem, regions) = (&tally, &next, &mem, &regions);
            let base = image.path();
            s.spawn(move || {
                while let Some(d) = damages.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compare_one(&dir, &base, mem, regions, d, tally);
                }
                let _ = fs::remove_dir_all(&dir);
            });
        }
    });
    let t = tally.into_inner().unwrap();
    eprintln!(
        "{} damages: {} corrupt, {} differ for a known reason, {} differ",
        t.done,
        t.corrupt,
        t.explained.len(),
        t.wrong.len()
    );
    for e in &t.explained {
        eprintln!("differs for a known reason: {e}");
    }
    assert!(t.wrong.is_empty(), "{}", t.wrong.join("\n"));
    assert!(t.done * 3 > damages.len(), "most damages could not be done");
}

/// `uvfs check` calls an image damaged when xfs_repair does, and only then, but for known reasons.
#[test]
fn verdicts() {
    let Some(image) = base() else { return };
    let mut damages = all_damages(&image.path());
    let mut i = 0;
    let only = std::env::var("UVFS_ONLY").ok();
    damages.retain(|d| {
        i += 1;
        let chosen = only.as_ref().is_none_or(|o| d.name().contains(o.as_str()));
        chosen && (i % step() == 0 || d.name().contains("lsn"))
    });
    eprintln!("{} damages to do", damages.len());
    compare_all(&image, &damages);
}
