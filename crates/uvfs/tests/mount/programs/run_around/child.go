// A static program that is started with descriptors of A and B: it does one operation, and looks.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

func say(what string, result int, failed error) { fmt.Println(what, result, failed) }

func use(name string, fd int) {
	text := make([]byte, 8)
	at, failed := syscall.Seek(fd, 0, 1)
	say(name+" at", int(at), failed)
	n, failed := syscall.Write(fd, []byte("<child>"))
	say("write", n, failed)
	n, failed = syscall.Pread(fd, text, 3)
	say("pread "+string(text[:max(n, 0)]), n, failed)
	n, failed = syscall.Read(fd, text)
	say("read "+string(text[:max(n, 0)]), n, failed)
}

func main() {
	operation := os.Args[3]
	a, _ := strconv.Atoi(os.Args[5])
	b, _ := strconv.Atoi(os.Args[6])
	switch operation {
	case "close":
		say("close", 0, syscall.Close(a))
	case "reopen":
		say("close", 0, syscall.Close(a))
		fd, failed := syscall.Open("B", syscall.O_RDWR, 0)
		say("open", fd, failed)
	case "open":
		fd, failed := syscall.Open("A", syscall.O_RDWR, 0)
		say("open", 0, failed)
		use("again", fd)
	case "dup2", "dup3":
		say("dup3", 0, syscall.Dup3(b, a, 0))
	case "close_range":
		_, _, failed := syscall.RawSyscall(436, uintptr(a), uintptr(b), 0)
		say("close_range", int(failed), nil)
	case "lseek":
		at, failed := syscall.Seek(a, 7, 0)
		say("seek", int(at), failed)
	case "read":
		text := make([]byte, 11)
		n, failed := syscall.Read(a, text)
		say("read "+string(text), n, failed)
	case "write":
		n, failed := syscall.Write(a, []byte("by the child"))
		say("write", n, failed)
	case "mmap":
		at, failed := syscall.Mmap(a, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
		say("mmap", len(at), failed)
		if failed == nil {
			say("mapped "+string(at[340:360]), 0, nil)
			copy(at[20:], "MAPPED")
		}
	case "fork", "exec":
		child := exec.Command("/bin/sh", "-c", "echo shell >&3; head -c 9 <&4")
		child.ExtraFiles = []*os.File{os.NewFile(uintptr(a), "A"), os.NewFile(uintptr(b), "B")}
		text, failed := child.CombinedOutput()
		say("shell "+string(text), 0, failed)
	}
	use("A", a)
	use("B", b)
	os.Exit(9)
}
