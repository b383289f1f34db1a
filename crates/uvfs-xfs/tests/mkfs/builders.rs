//! What builders of images ask for: names left out, owners, labels, prototypes, sizes that fit.

use super::*;
use std::collections::BTreeSet;
use uvfs_testing::{Need, has};
use uvfs_xfs::format::FileType;
use uvfs_xfs::mkfs::Margin;
use uvfs_xfs::mkfs::source::{
    Contexts, HostDir, IdRange, Others, Owners, Patterns, Root, Rules, SourceEntry,
};

/// Numbers that look random and are the same in each run (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % n as u64) as usize
    }

    fn one_of<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }
}

/// All entries of a source, by path.
fn entries(root: &Root) -> Result<Vec<(String, SourceEntry)>, MkfsError> {
    let mut out = Vec::new();
    let mut todo = vec![(String::new(), root.dir.clone())];
    while let Some((at, dir)) = todo.pop() {
        for e in dir.list()? {
            let path = format!("{at}{}", String::from_utf8_lossy(&e.name));
            if e.meta.is_dir() {
                let below = dir.clone().enter(&e.name).unwrap().unwrap();
                todo.push((format!("{path}/"), below));
            }
            out.push((path, e));
        }
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

fn paths(root: &Root) -> BTreeSet<String> {
    let all = entries(root).unwrap();
    all.into_iter().map(|(path, _)| path).collect()
}

fn changed(from: &Path, rules: &Rules) -> Result<Root, MkfsError> {
    rules.apply(HostDir::root(from, Vec::new()).unwrap())
}

/// The names that `tar` puts into an archive.
fn archived(from: &Path, exclude: &str) -> BTreeSet<String> {
    let mut tar = Command::new("tar");
    tar.env("LC_ALL", "C.UTF-8").arg("-C").arg(from);
    let tar = tar.arg(format!("--exclude={exclude}"));
    let out = tar.args(["-cvf", "/dev/null", "--quoting-style=literal", "."]);
    let out = out.output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let names = text
        .lines()
        .map(|l| l.trim_start_matches("./").trim_end_matches('/'));
    let names = names.filter(|n| !n.is_empty() && *n != ".");
    names.map(str::to_owned).collect()
}

/// A pattern leaves out what `tar --exclude` leaves out.
#[test]
fn patterns_leave_out_what_tar_leaves_out() {
    if !has(&[Need::Program("tar")]) {
        return;
    }
    let dir = scratch();
    let from = dir.path();
    for name in [
        "a", "b", "a.b", ".a", "ab", "a-b", "ä", "aé", "d/a", "d/b", "d/e/a", "d/e/.x", "d/e/f/g",
        "A", "[a]", "a*", "a?", "\\a", "]", "e/d/a", "e/a b", "-", "!", "^a", "1", "d/12", "aaaa",
    ] {
        let path = from.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let mut patterns: Vec<String> = [
        "a",
        "*",
        "?",
        ".",
        "./a",
        "./d",
        "d/a",
        "d/*",
        "*/a",
        "e/a",
        "d/e",
        "e",
        "*.b",
        "[ab]",
        "[!a]",
        "[^a]",
        "[a-c]*",
        "[[:alpha:]]",
        "[[:digit:]]*",
        "\\*",
        "a\\*",
        "[]]",
        "[!]]",
        "[a",
        "\\\\a",
        "[[]a]",
        "??",
        "./*",
        "*/*/*",
        "./?",
        "[a-]",
        "[-a]",
        "d/",
        "/a",
        "./[d]",
        "ä",
        "[ä]",
        "*é",
        "a b",
        "",
        "**",
        "*a",
        "!",
        "^a",
        "\\^a",
        "[\\]]",
        "[a\\-b]",
    ]
    .map(str::to_owned)
    .into();
    let mut numbers = Numbers(7);
    for _ in 0..150 {
        let parts = [
            "a", "b", "d", "*", "?", "/", ".", "[ab]", "[!d]", "\\", "[", "]", "-", "e",
        ];
        let count = 1 + numbers.below(5);
        patterns.push((0..count).map(|_| numbers.one_of(&parts)).collect());
    }
    for pattern in patterns {
        // Names in the archive begin with "./", so that this matches nothing there.
        if pattern.starts_with('/') {
            continue;
        }
        let rules = Rules {
            exclude: Patterns::new(&[&pattern]).unwrap(),
            ..Rules::default()
        };
        let ours = paths(&changed(from, &rules).unwrap());
        assert_eq!(ours, archived(from, &pattern), "{pattern:?}");
    }
    // One that begins with a slash begins at the root.
    for (pattern, gone) in [("/a", "a"), ("/d/e/f", "d/e/f/g"), ("/?/a", "d/a")] {
        let rules = Rules {
            exclude: Patterns::new(&[pattern]).unwrap(),
            ..Rules::default()
        };
        let left = paths(&changed(from, &rules).unwrap());
        assert!(!left.contains(gone) && left.contains("d/e/a"), "{pattern}");
    }
}

/// Only what is included is there, with what is below and above it, and exclusion goes first.
#[test]
fn what_is_included_comes_with_what_leads_there() {
    let dir = scratch();
    for name in ["a/b/c/x", "a/b/y", "a/z", "k/x", "k/l/m", "none/n"] {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let left = |include: &[&str], exclude: &[&str]| {
        let rules = Rules {
            include: Patterns::new(include).unwrap(),
            exclude: Patterns::new(exclude).unwrap(),
            ..Rules::default()
        };
        paths(&changed(dir.path(), &rules).unwrap())
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(
        left(&["x"], &[]),
        ["a", "a/b", "a/b/c", "a/b/c/x", "k", "k/x"]
    );
    assert_eq!(
        left(&["/k", "y"], &[]),
        ["a", "a/b", "a/b/y", "k", "k/l", "k/l/m", "k/x"]
    );
    assert_eq!(left(&["/k", "y"], &["l", "./a"]), ["k", "k/x"]);
    assert_eq!(left(&["nothing"], &[]), [""; 0]);
    assert_eq!(left(&["*"], &[]).len(), 12);
}

/// Owners are set, mapped, and mapped in access control lists, or refused with the file.
#[test]
fn owners_are_mapped() {
    if !has(&[Need::Root, Need::Program("setfacl")]) {
        return;
    }
    let dir = scratch();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    run(
        "setfacl",
        &["-m".as_ref(), "u:7:r,g:1005:w".as_ref(), file.as_os_str()],
    );
    run("chown", &["1003:5".as_ref(), file.as_os_str()]);
    let range = |from, to, count| IdRange { from, to, count };
    let rules = |ranges: &[IdRange], others| Rules {
        users: Owners {
            ranges: ranges.into(),
            others,
        },
        groups: Owners {
            ranges: vec![range(1000, 0, 10)],
            others: Others::Kept,
        },
        ..Rules::default()
    };
    let owners = |rules: &Rules| {
        let root = changed(dir.path(), rules)?;
        let entry = entries(&root)?.remove(0).1;
        let list = entry
            .attrs
            .iter()
            .find(|a| &a.name[..] == b"SGI_ACL_FILE")
            .unwrap();
        let ids: Vec<u32> = list.value[4..]
            .chunks(12)
            .map(|e| u32::from_be_bytes(e[4..8].try_into().unwrap()))
            .filter(|id| *id != u32::MAX)
            .collect();
        Ok::<_, MkfsError>((entry.meta.uid, entry.meta.gid, ids))
    };
    assert_eq!(
        owners(&rules(&[], Others::Kept)).unwrap(),
        (1003, 5, vec![7, 5])
    );
    assert_eq!(
        owners(&rules(&[], Others::Set(0))).unwrap(),
        (0, 5, vec![7, 5])
    );
    let ranges = [range(0, 100_000, 1000), range(1000, 0, 4)];
    assert_eq!(
        owners(&rules(&ranges, Others::Refused)).unwrap(),
        (3, 5, vec![100_007, 5])
    );
    assert_eq!(
        owners(&rules(&ranges[1..], Others::Set(9))).unwrap(),
        (3, 5, vec![7, 5])
    );
    for ranges in [&ranges[..1], &ranges[1..]] {
        let error = owners(&rules(ranges, Others::Refused))
            .unwrap_err()
            .to_string();
        assert!(error.contains("none of the ranges"), "{error}");
    }
}

/// Paths get the labels that libselinux gives them.
#[test]
fn labels_are_those_of_libselinux() {
    if !has(&[Need::Program("matchpathcon")]) {
        return;
    }
    let dir = scratch();
    let file = dir.path().join("contexts");
    let mut numbers = Numbers(1);
    let words = [
        "/usr", "/bin", "/l", "s", "\\.", ".", "x", ".*", "(/.*)?", "[^/]*", "/+", "(a|b)",
    ];
    let types = ["", "--", "-d", "-l", "-c", "-b", "-p", "-s"];
    let kinds = [
        ("file", FileType::Regular),
        ("dir", FileType::Directory),
        ("lnk_file", FileType::Symlink),
        ("chr_file", FileType::CharDevice),
        ("blk_file", FileType::BlockDevice),
        ("pipe", FileType::Fifo),
        ("sock_file", FileType::Socket),
    ];
    let pieces = ["/usr", "/bin", "/l", "s", ".", "x", "/", "a", "b"];
    let mut seen = BTreeSet::new();
    for round in 0..12 {
        let mut lines = |count: usize, name: &str| {
            let mut text = String::from("# a comment\n\n");
            for i in 0..count {
                let path: String = (0..1 + numbers.below(4))
                    .map(|_| numbers.one_of(&words))
                    .collect();
                let kind = numbers.one_of(&types);
                let label = match numbers.below(8) {
                    0 => "<<none>>".into(),
                    _ => format!("u:r:{name}{i}_t:s0"),
                };
                // The same twice is an error there.
                if seen.insert((round, path.clone(), kind)) {
                    text += &format!("/{path}\t{kind}  {label}\n");
                }
            }
            text
        };
        fs::write(&file, lines(30, "base")).unwrap();
        fs::write(dir.path().join("contexts.local"), lines(4, "local")).unwrap();
        fs::write(dir.path().join("contexts.homedirs"), lines(4, "home")).unwrap();
        fs::write(dir.path().join("contexts.subs"), "/s /usr\n/usr/s /bin\n").unwrap();
        fs::write(
            dir.path().join("contexts.subs_dist"),
            "/x /\n/bin/x /usr/l\n",
        )
        .unwrap();
        let contexts = Contexts::read(&file).unwrap();
        let mut paths: Vec<String> = vec!["/".into(), "/s/l".into(), "/x/usr".into(), "/s".into()];
        for _ in 0..80 {
            let path: String = (0..1 + numbers.below(5))
                .map(|_| numbers.one_of(&pieces))
                .collect();
            let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
            paths.push(format!("/{}", parts.join("/")));
        }
        for (name, kind) in kinds {
            let mut args = ["-m", name, "-f"].map(str::to_owned).to_vec();
            args.push(file.to_str().unwrap().into());
            args.extend(paths.iter().cloned());
            let expected = run("matchpathcon", &args);
            for (path, line) in paths.iter().zip(expected.lines()) {
                let label = contexts.label(path.as_bytes(), kind);
                let ours = String::from_utf8_lossy(label.unwrap_or(b"<<none>>"));
                assert_eq!(format!("{path}\t{ours}"), line, "{name}, round {round}");
            }
        }
    }
    for wrong in [
        "/a",
        "/a -x u:r:t:s0",
        "/a( u:r:t:s0",
        "/a -- u:r:t:s0 more",
        "/(?=x) u:r:t:s0",
    ] {
        fs::write(&file, format!("/ok u:r:t:s0\n{wrong}\n")).unwrap();
        let (path, error) = Contexts::read(&file).unwrap_err();
        assert_eq!(path, file);
        assert!(error.to_string().contains("line 2"), "{wrong}: {error}");
    }
}

/// A prototype becomes what mkfs.xfs makes of it.
#[test]
fn prototypes_become_what_mkfs_xfs_makes() {
    if !can_run() {
        return;
    }
    let dir = scratch();
    let contents = dir.path().join("contents");
    fs::write(&contents, pattern(3, 70_000)).unwrap();
    let c = contents.display();
    let text = format!(
        "/boot/none\n0 0\nd--755 3 1\n: the root\nusr d--777 3 1\n  sh ---755 3 1 {c}\n  ken d-g755 6 1\n  $\n  \
         b0 b--644 3 1 8 17\n c0 c--600 0x10 1 5 1\n fifo p--644 3 010\n slink l--644 3 1 /a/symbolic/link\n \
         su -u-644 1 2 {c} sg -ug711 1 2 /dev/null/../../etc/hostname\n$\n deep d--700 0 0 er d--700 0 0 $ $\n$\n"
    )
    .replace("/dev/null/../../etc/hostname", &c.to_string());
    let file = dir.path().join("prototype");
    fs::write(&file, &text).unwrap();
    let image = Image::new();
    assert!(image.mkfs(&["-p", file.to_str().unwrap()]));
    let ours = dir.path().join("image");
    let from = |spaces| From::Prototype {
        file: file.clone(),
        slashes_are_spaces: spaces,
    };
    make(&ours, &MkfsOptions::default(), from(false)).unwrap();
    sound(&ours, "a prototype");
    // All but times, which are those of the making.
    let shown = |image: &Path| -> Vec<String> {
        let mount = Mount::new(image, "ro,norecovery").unwrap();
        let list = ["-printf", "%P %y %m %U %G %n %s %l %D\n"];
        let mut args = vec![mount.path().to_str().unwrap(), "-type", "f"];
        args.extend(list);
        args.extend(["-o", "!", "-type", "f", "-printf", "%P %y %m %U %G %n %l\n"]);
        let mut lines: Vec<String> = run("find", &args).lines().map(str::to_owned).collect();
        for at in ["usr/sh", "usr/su"] {
            lines.push(digest(&mount.path().join(at), 70_000).to_string());
        }
        for at in ["usr/b0", "usr/c0"] {
            lines.push(
                fs::metadata(mount.path().join(at))
                    .unwrap()
                    .rdev()
                    .to_string(),
            );
        }
        let lines = lines.iter().map(|l| match l.rsplit_once(' ') {
            // The number of the mount's device.
            Some((l, device)) if device.parse::<u64>().is_ok() => l.to_owned(),
            _ => l.clone(),
        });
        let mut lines: Vec<String> = lines.collect();
        lines.sort();
        lines
    };
    same(&shown(&ours), &shown(&image.path()), "the prototype");
    fs::remove_file(&ours).unwrap();
    fs::write(&file, "x 0 0 d--755 0 0 a/b p--644 0 0 $").unwrap();
    assert!(make(&ours, &MkfsOptions::default(), from(false)).is_err());
    make(&ours, &MkfsOptions::default(), from(true)).unwrap();
    let volume = Volume::open(Arc::new(FileBlocks::open(&ours).unwrap())).unwrap();
    volume.lookup(&volume.root().unwrap(), b"a b").unwrap();
    fs::remove_file(&ours).unwrap();
    for wrong in [
        "",
        "x",
        "x 0",
        "x 0 0",
        "x 0 0 ---644 0 0 /etc/hostname",
        "x 0 0 d--755 0",
        "x 0 0 d--755 0 0 a",
        "x 0 0 d--755 0 0 a p--648 0 0 $",
        "x 0 0 d--755 0 0 a p-x644 0 0 $",
        "x 0 0 d--755 0 0 a p--644 0 0 a p--644 0 0 $",
        "x 0 0 d--755 0 0 .. p--644 0 0 $",
        "x 0 0 d--755 0 0 a z--644 0 0 $",
        "x 0 0 d--755 0 0 a r--644 0 0 10m $",
        "x 0 0 d--755 0 0 a ---644 0 0 /none/there $",
        "x 0 0 d--755 0 0 a ---644 0 0 / $",
        "x 0 0 d--755 0 0 a p--644 99999999999 0 $",
    ] {
        fs::write(&file, wrong).unwrap();
        let error = make(&ours, &MkfsOptions::default(), from(false)).unwrap_err();
        assert!(!ours.exists(), "{wrong}: {error}");
    }
}

/// A file system as small as its contents allow has room for them, is sound, and is no larger than it says.
#[test]
fn the_smallest_size_has_room_for_all() {
    let dir = scratch();
    let mut numbers = Numbers(3);
    let image = dir.path().join("image");
    for round in 0..14 {
        let from = dir.path().join(format!("from{round}"));
        fs::create_dir(&from).unwrap();
        let (files, most) = [
            (0, 1),
            (300, 100),
            (2500, 6000),
            (20, 3_000_000),
            (4, 30_000_000),
        ][round % 5];
        let mut at = from.clone();
        for i in 0..files {
            if numbers.below(40) == 0 {
                at = at.join(format!("d{i}"));
                fs::create_dir(&at).unwrap();
            }
            let len = numbers.below(most);
            fs::write(at.join(format!("file-{i}")), vec![7; len]).unwrap();
        }
        let block_size = [4096, 1024, 16384, 4096, 65536][round % 5];
        let options = MkfsOptions {
            smallest: true,
            margin: Margin::Bytes(0),
            block_size,
            ..MkfsOptions::default()
        };
        let made = make(&image, &options, From::Directory(from.clone()));
        let made = made.unwrap_or_else(|e| panic!("round {round}: {e}"));
        sound(&image, &format!("round {round}"));
        let planned = MkfsOptions {
            dry_run: true,
            ..options.clone()
        };
        fs::remove_file(&image).unwrap();
        let plan = make(&image, &planned, From::Directory(from.clone())).unwrap();
        assert!(!image.exists());
        assert_eq!(plan.inodes, made.inodes);
        let sizes = |sb: &uvfs_xfs::format::Superblock| (sb.dblocks, sb.agcount, sb.logblocks);
        assert_eq!(sizes(&plan.superblock), sizes(&made.superblock));
        let bytes = made.superblock.dblocks.get() * u64::from(block_size);
        let log = u64::from(made.superblock.logblocks.get()) * u64::from(block_size);
        let groups = u64::from(made.superblock.agcount.get());
        // With blocks of 64 KiB the log alone takes 60 MiB of one of four groups.
        let least = if block_size > 16384 {
            300 << 20
        } else {
            17 << 20
        };
        let content = (made.bytes + log) * 11 / 10;
        let small = u64::max(least, content + groups * (4 << 20) + (16 << 20));
        assert!(
            bytes <= small,
            "round {round}: {bytes} bytes for {}",
            made.bytes
        );
        fs::remove_dir_all(&from).unwrap();
    }
}

/// A whole image has no holes, and is the same otherwise.
#[test]
fn a_whole_image_has_no_holes() {
    let dir = scratch();
    let image = dir.path().join("image");
    let mut all = Vec::new();
    for whole in [false, true] {
        let options = MkfsOptions {
            whole,
            reproducible: true,
            ..sized(17 << 20)
        };
        make(&image, &options, From::Nothing).unwrap();
        let meta = fs::metadata(&image).unwrap();
        assert_eq!(
            meta.blocks() * 512 >= meta.len(),
            whole,
            "{} blocks",
            meta.blocks()
        );
        all.push(fs::read(&image).unwrap());
        fs::remove_file(&image).unwrap();
        let mut out = Vec::new();
        uvfs_xfs::mkfs::mkfs_to(&mut out, &options, From::Nothing, &MkfsProgress::default())
            .unwrap();
        all.push(out);
    }
    assert!(all.iter().all(|bytes| *bytes == all[0]));
}

/// What an image is written to has no name of the library's.
#[test]
fn an_image_is_written_to_what_fails() {
    let mut full = [0; 5000];
    let mut full = &mut full[..];
    let options = sized(17 << 20);
    let made =
        uvfs_xfs::mkfs::mkfs_to(&mut full, &options, From::Nothing, &MkfsProgress::default());
    let said = made.unwrap_err().to_string();
    assert!(said.starts_with("writing the image: "), "{said}");
}

/// Prototypes and contexts of any kind are read or refused.
#[test]
fn files_of_any_kind_are_read_or_refused() {
    let dir = scratch();
    let file = dir.path().join("file");
    let mut numbers = Numbers(11);
    let words = [
        "x",
        "0",
        "0x1f",
        "07",
        "d--755",
        "---644",
        "-ug777",
        "l--777",
        "b--600",
        "r--644",
        "$",
        ":",
        "\n",
        " ",
        "/etc",
        "a/b",
        "--",
        "-d",
        "<<none>>",
        "[",
        "(",
        "|",
        "\\",
        "*",
        "{",
        "é",
        "\0",
        "99999999999",
        "u:r:t:s0",
    ];
    for _ in 0..2000 {
        let count = numbers.below(30);
        let mut text = String::from(["", "x 0 0 d--755 0 0 "][numbers.below(2)]);
        for _ in 0..count {
            text += numbers.one_of(&words);
            text += ["", " ", " ", "\n"][numbers.below(4)];
        }
        fs::write(&file, text).unwrap();
        let _ =
            Contexts::read(&file).map(|c| c.label(b"/a/b", FileType::Regular).map(<[u8]>::to_vec));
        let from = From::Prototype {
            file: file.clone(),
            slashes_are_spaces: numbers.below(2) == 0,
        };
        let planned = MkfsOptions {
            dry_run: true,
            ..MkfsOptions::default()
        };
        let _ = make(&dir.path().join("image"), &planned, from);
    }
}

/// A file that is there already gets the size that its new contents need, if that is asked for.
#[test]
fn the_smallest_size_is_also_that_of_a_file_that_is_there() {
    let dir = scratch();
    let image = dir.path().join("image");
    make(&image, &sized(400 << 20), From::Nothing).unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("large"), vec![1; 20 << 20]).unwrap();
    let planned = MkfsOptions {
        dry_run: true,
        ..sized(17 << 20)
    };
    let full = make(&image, &planned, From::Directory(source.clone())).unwrap_err();
    assert!(matches!(full, MkfsError::NoSpace { .. }), "{full}");
    fs::remove_file(source.join("large")).unwrap();
    let options = MkfsOptions {
        smallest: true,
        force: true,
        ..MkfsOptions::default()
    };
    make(&image, &options, From::Directory(source)).unwrap();
    assert_eq!(fs::metadata(&image).unwrap().len(), 17 << 20);
    sound(&image, "smaller than before");
}
