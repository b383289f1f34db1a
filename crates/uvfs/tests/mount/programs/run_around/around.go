// The same program in Go: a dynamic one, as it has C in it. Go's own system calls are those around the C library.
package main

/*
#cgo CFLAGS: -DWITH_GO -O1 -w
#cgo LDFLAGS: -lpthread
int around_main(int count, char **list);
*/
import "C"

import (
	"os"
	"syscall"
	"unsafe"
)

//export goSyscall
func goSyscall(nr, a, b, c, d, e, f C.long) C.long {
	done, _, failed := syscall.Syscall6(uintptr(nr), uintptr(a), uintptr(b), uintptr(c), uintptr(d), uintptr(e), uintptr(f))
	if failed != 0 {
		return -C.long(failed)
	}
	return C.long(done)
}

func main() {
	list := make([]*C.char, len(os.Args)+1)
	for i, text := range os.Args {
		list[i] = C.CString(text)
	}
	os.Exit(int(C.around_main(C.int(len(os.Args)), (**C.char)(unsafe.Pointer(&list[0])))))
}
