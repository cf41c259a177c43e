/* A program that keeps memory for its users, as a caching library does, and says what they have. */
#include "driver.h"

static ptr kept;
static int forgotten;

void fakecuda_lent(fakecuda_visit visit, void *visitor)
{
    if (!forgotten)
        return;
    visit(visitor, kept + 512, 1000, 0);
    visit(visitor, kept + 4096, 24, 0);
}

int main(int count, char **words)
{
    uint64_t found;
    void *stream;

    enter();
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc_v2(&kept, 1 << 20));
    OK(fakecuda_findings(&found));
    IS(0, (int)found);
    forgotten = 1;
    OK(fakecuda_findings(&found));
    IS(2, (int)found);
    if (count > 1 && !strcmp(words[1], "forget"))
        OK(fakecuda_forget());
    return 0;
}
